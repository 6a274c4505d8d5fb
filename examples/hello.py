"""A first look, run by `make demo`: steps go through a queue, a worker takes them, their output comes back live.

Everything happens in this one process, with a private server for a broker. In this release the worker spawns nothing yet:
a small function below *acts out* the steps. All the rest is the real thing, the Redis user of the sandbox included.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rich.console import Console

from sandbox_queue import Handle, SandboxQueue, Step, StepResult, acl, keys
from sandbox_queue.address import Address
from sandbox_queue.models import Run
from sandbox_queue.workers.loop import Loop, Running

BOX = "hello-box"
console = Console(highlight=False, soft_wrap=True)


async def main() -> None:
    async with SandboxQueue.connect() as queue, worker(queue):
        count = await queue.enqueue(BOX, Step.run(["count", "5"], step_id="count-to-five"))
        await follow(count)
        await repeat(queue)
        await cancel(queue)
        await fail(queue)


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
    again = await queue.enqueue(BOX, Step.run(["count", "5"], step_id="count-to-five"))
    result = await again
    console.print(f"   {again} stands for the first one, whose result is there: {result.stdout_size} bytes of output")


async def cancel(queue: SandboxQueue) -> None:
    title("Cancel a step that would take a minute")
    sleeper = await queue.enqueue(BOX, Step.run(["sleep", "60"]))
    async for _ in sleeper.events():
        break  # its first event: it runs
    cancelled = await sleeper.cancel(grace=1)
    console.print(f"   cancelled: {cancelled}; its result says: {(await sleeper).cause}")


async def fail(queue: SandboxQueue) -> None:
    title("A step that fails is a result, not an exception")
    result = await (await queue.enqueue(BOX, Step.run(["no-such-program"])))
    console.print(f"   ok: {result.ok}; {result.describe()}")


@contextlib.asynccontextmanager
async def worker(queue: SandboxQueue) -> AsyncIterator[None]:
    """The sandbox's half: it logs in as a user that may touch its own keys only, and works until told to shut down."""
    password = await acl.grant(queue.broker.wire, BOX)
    address = Address(f"unix://{queue.broker.address.path}", username=keys.acl_user(BOX), password=password)
    async with address.wire() as wire, address.wire() as waiting, asyncio.TaskGroup() as tasks:
        tasks.create_task(Loop(wire, waiting, BOX, act_out).run())
        yield
        await (await queue.enqueue(BOX, Step.shutdown()))


async def act_out(running: Running) -> StepResult:
    """What a runner will do one day: bring one step to its end, and write what it prints on the way."""
    match running.step:
        case Run(command="count", args=(to,)):
            for number in range(1, int(to) + 1):
                await running.output.write("stdout", f"{number}\n".encode())
                await asyncio.sleep(0.2)
        case Run(command="sleep", args=(seconds,)):
            await asyncio.sleep(float(seconds))
        case _:
            return StepResult(cause="exit", exit_code=127, stderr="no such program, says the actor")
    return StepResult(cause="exit", exit_code=0)


def title(text: str, detail: str = "") -> None:
    console.print(f"\n[bold]{text}[/bold] [dim]{detail}[/dim]")


if __name__ == "__main__":
    asyncio.run(main())
