"""A lean start: import redis-py without what the worker never uses. To be imported before anything that imports redis.

`redis/__init__.py` loads clients for Cluster and Sentinel, all command classes, PyJWT and, where it is installed,
cryptography; the worker needs `redis.asyncio.connection`. Measured: 43 MB of memory without this, 28 with it, and a third of
the start-up, in every sandbox. Only the worker's own process does this, which nobody else imports into.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from types import ModuleType


class _PackageNotFoundError(ModuleNotFoundError):
    """What redis-py expects of `importlib.metadata` when it asks for its own version, and copes with."""


def _version(name: str) -> str:
    raise _PackageNotFoundError(name)


def _install() -> None:
    metadata = ModuleType("importlib.metadata")
    metadata.__dict__.update(PackageNotFoundError=_PackageNotFoundError, version=_version)
    stand_ins = {"jwt": ModuleType("jwt"), "importlib.metadata": metadata}
    sys.modules.update(stand_ins)
    vars(importlib)["metadata"] = metadata
    try:
        for name in ("redis", "redis.asyncio"):  # as packages whose modules can be found, but which load none by themselves
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"no module named {name}", name=name)
            package = sys.modules[name] = ModuleType(name)
            package.__spec__ = spec
            package.__path__ = list(spec.submodule_search_locations or ())
        importlib.import_module("redis.asyncio.connection")
    finally:
        for name in stand_ins:  # whoever else asks for them gets the real ones
            sys.modules.pop(name, None)
        vars(importlib).pop("metadata", None)


def all_is_imported() -> None:
    """What is loaded now stays: the collector need never look at it, and its pages stay shared with children."""
    gc.freeze()
    gc.enable()


gc.disable()  # nothing that is being imported is garbage: collecting meanwhile costs a tenth of the start-up
if "redis" not in sys.modules:
    _install()
