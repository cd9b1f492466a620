"""Programs compiled ahead of time, and the switches of JAX that must not disturb them.

Such a program runs for real inside a trace and is unaffected by later changes of ``enable_x64``, ``default_device`` and
``clear_caches``. Two debugging switches would refuse it or raise on the last tenant's NaN, so `run` turns them off.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ._compiles import CompileCounter

Program = Callable[..., Any]


def run(program: Program, *args: Any) -> Any:
    """Calls a compiled program, whatever debugging switches are on.

    Reading the flags costs a fraction of a microsecond, entering the contexts ten, so they are entered only where a
    flag is set.
    """
    config: Any = jax.config
    if config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs:
        with _undisturbed():
            return program(*args)
    return program(*args)


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    # A program traced under debug_nans loses its donation, and one run under it checks the previous tenant's values.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


class Programs:
    """Compiles each program once, for one device, and keeps it.

    Args:
        device: Where the programs run.
        committed: Whether their results are committed to the device, or move freely as those of `jnp.zeros` do.
        counter: Counts the compiles.
    """

    # Programs that depend on the caller's shapes and functions: the least recently used one goes, so that a caller who
    # writes `lease.update(lambda ...)` in a loop pays in compiles, which are counted, and not in memory for ever.
    MAX_CALLERS = 256

    def __init__(self, device: Any, committed: bool, counter: CompileCounter) -> None:
        self._device = device
        self._options: dict[str, Any] = (
            {"out_shardings": jax.sharding.SingleDeviceSharding(device)} if committed else {}
        )
        self._counter = counter
        self._lock = threading.RLock()
        self._own: dict[Hashable, Program] = {}
        self._callers: OrderedDict[Hashable, Program] = OrderedDict()

    def own(self, key: Hashable, function: Callable[..., Any], args: Sequence[Any], donate: Sequence[int]) -> Program:
        """Returns the pool's own program for `key`; their number is bounded by the number of size classes."""
        program = self._own.get(key)
        if program is None:
            with self._lock:  # Two threads that meet here compile once.
                program = self._own.get(key)
                if program is None:
                    program = self._own[key] = self.compile(function, args, donate)
        return program

    def callers(self, key: Hashable, function: Callable[..., Any], args: Sequence[Any]) -> Program:
        """Returns the program for a shape or function of the caller's, its first argument donated."""
        with self._lock:
            program = self._callers.get(key)
            if program is not None:
                self._callers.move_to_end(key)
                return program
        program = self.compile(function, args, (0,))  # May trace the caller's code, so not under the lock.
        with self._lock:
            self._callers[key] = program
            while len(self._callers) > self.MAX_CALLERS:
                self._callers.popitem(last=False)
        return program

    def compile(self, function: Callable[..., Any], args: Sequence[Any], donate: Sequence[int]) -> Program:
        """Compiles `function` for the shapes and dtypes of `args`, donating those listed."""
        jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True, **self._options)
        wide = any(np.dtype(getattr(a, "dtype", np.int32)).itemsize == 8 for a in args)
        with _undisturbed(), jax.default_device(self._device), self._counter.watch(), contextlib.ExitStack() as stack:
            if wide:  # A float64 slot outlives the x64 mode that it was made in.
                stack.enter_context(jax.enable_x64(True))
            return jitted.lower(*args).compile()
