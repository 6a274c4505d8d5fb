"""A first look, run by `make demo`: steps go through a queue, a worker runs them, their output comes back live.

Nothing needs to be installed or running: the broker is a private server, and the worker a child process, in a temporary
directory and under a Redis user that may touch its own keys only. It isolates nothing: this is your own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator

from rich.console import Console

from sandbox_queue import Handle, SandboxQueue, Step, acl, keys

BOX = "hello-box"
console = Console(highlight=False, soft_wrap=True)


async def main() -> None:
    async with SandboxQueue.connect() as queue, worker(queue):
        count = await queue.enqueue(BOX, Step.run("for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done", step_id="count"))
        await follow(count)
        await repeat(queue)
        await fail(queue)
        await cancel(queue)
        await files(queue)


async def follow(count: Handle) -> None:
    title("Follow a step while it runs")
    cursors = []
    async for line in count.lines():
        console.print(f"   {line.stream}: {line.text}")
        cursors.append(line.cursor)
    result = await count
    console.print(f"   it ended: {result.cause} {result.exit_code}, after {result.duration:.1f} s")

    title("Read on from a cursor, as a reader does whose connection broke", f"since {cursors[2]}")
    async for line in count.lines(since=cursors[2]):
        console.print(f"   {line.stream}: {line.text}")


async def repeat(queue: SandboxQueue) -> None:
    title("Enqueue the same step id again: it does not run twice")
    again = await queue.enqueue(BOX, Step.run("echo never", step_id="count"))
    console.print(f"   {again} is the first one, whose output was: {(await again).stdout!r}")


async def fail(queue: SandboxQueue) -> None:
    title("A command that fails is a result, not an exception")
    result = await (await queue.enqueue(BOX, Step.run(["ls", "/no/such/place"])))
    console.print(f"   ok: {result.ok}; {result.describe()}")


async def cancel(queue: SandboxQueue) -> None:
    title("Cancel a step that has left a daemon behind, in a session of its own and with an empty environment")
    sleeper = await queue.enqueue(BOX, Step.run("env -i setsid sh -c 'echo $$; exec sleep 300' & wait"))
    pid = (await anext(sleeper.lines())).text  # the daemon's first line: it runs
    cancelled = await sleeper.cancel(grace=1)
    alive = await (await queue.enqueue(BOX, Step.run(f"kill -0 {pid}")))
    console.print(f"   cancelled: {cancelled}; its result says: {(await sleeper).cause}; daemon alive: {alive.ok}")


async def files(queue: SandboxQueue) -> None:
    title("Files, without a shell in between")
    await (await queue.enqueue(BOX, Step.write_file("notes/todo.txt", "TODO: write a service\n")))
    found = await (await queue.enqueue(BOX, Step.grep("TODO", ".")))
    console.print(f"   grep found: {found.content}")


@contextlib.asynccontextmanager
async def worker(queue: SandboxQueue) -> AsyncIterator[None]:
    """`sandbox-worker` as a child process, ended by a shutdown step."""
    password = await acl.grant(queue.broker.wire, BOX)
    with tempfile.TemporaryDirectory(prefix="hello-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sandbox_queue.workers", "--sandbox-id", BOX, "--work-dir", folder, "--root", folder),
            *("--redis-url", f"unix://{keys.acl_user(BOX)}@{queue.broker.address.path}"),
            env={**os.environ, "SANDBOX_QUEUE_REDIS_PASSWORD": password},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield
            await (await queue.enqueue(BOX, Step.shutdown()))
        except BaseException:
            process.terminate()
            raise
        finally:
            await process.wait()


def title(text: str, detail: str = "") -> None:
    console.print(f"\n[bold]{text}[/bold] [dim]{detail}[/dim]")


if __name__ == "__main__":
    asyncio.run(main())
