"""The `arenax` command: demonstrates and stresses the pool. It draws with `arenax[tools]`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._result import Result as Result
    from ._simulate import simulate as simulate
    from ._traces import Trace as Trace

# Imported when it is asked for: a loader's worker imports a module of this package, and must not import jax with it.
_LAZY = {"Result": "_result", "Trace": "_traces", "simulate": "_simulate"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
