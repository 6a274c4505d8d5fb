"""`sandbox-launcher`: the control plane's entrypoint. This release has none yet; the name is reserved, honestly."""

from __future__ import annotations

import sys


def main() -> int:
    """Say that there is nothing to run here yet; returns the exit code."""
    print(
        "sandbox-launcher: this release has no launcher yet: it queues steps and runs a worker that you start yourself. "
        "See `make demo` and examples/hello.py.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
