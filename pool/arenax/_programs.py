"""Programs compiled ahead of time, and the switches of JAX that must not disturb them.

Such a program runs for real inside a trace and is unaffected by later changes of ``enable_x64``, ``default_device`` and
``clear_caches``. Two debugging switches would refuse it or raise on the last tenant's NaN, so `run` turns them off.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax

from ._compiles import CompileCounter
from ._private import CPP_CALL

_config: Any = jax.config
_debug_nans, _debug_infs = jax.debug_nans, jax.debug_infs
Program = Callable[..., Any]
Result = TypeVar("Result")
Context = contextlib.AbstractContextManager[Any]
WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def run(program: Program, *args: Any) -> Any:
    """Calls a compiled program, whatever debugging switches are on.

    Reading a flag costs a fraction of a microsecond, entering the contexts ten, so they are entered only where a flag
    is set.
    """
    if not _debug_nans.value and not _debug_infs.value:
        call = getattr(program, CPP_CALL, None) or program
        try:
            return call(*args)
        except ValueError:
            # Under `disable_jit` a compiled program refuses before it does anything: that flag need not be read.
            if not _config.jax_disable_jit:
                raise
    return within(undisturbed(), program, *args)


def run_with_host(program: Program, *args: Any) -> Any:
    """As `run`, for NumPy arguments: a transfer guard would refuse them, and with x64 off a float64 would be cut."""
    return within((jax.transfer_guard("allow"), jax.enable_x64(True)), run, program, *args)


def undisturbed() -> tuple[Context, ...]:
    """Contexts in which the debugging switches are off."""
    # A program traced under debug_nans loses its donation, and one run under it checks the previous tenant's values.
    return jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False)


def within(contexts: Sequence[Context], function: Callable[..., Result], *args: Any) -> Result:
    """Calls `function` within contexts of JAX, as a ``with`` of them would, and leaves them whatever strikes.

    Where an interrupt strikes as the ``__exit__`` of such a context begins, ``with`` goes on without it, and the thread
    has x64 mode, say, from then on. Each sets what it found on entry, so that leaving it once more does no harm.
    """
    begun: list[Context] = []
    try:
        for context in contexts:
            begun.append(context)
            context.__enter__()
        return function(*args)
    finally:
        try:
            _leave(begun)
        except BaseException:
            _leave(begun)
            raise


def _leave(begun: Sequence[Context]) -> None:
    for context in reversed(begun):
        try:
            context.__exit__(None, None, None)
        except (AttributeError, RuntimeError):  # The last was struck on entry, which classes and generators say so.
            pass


class Programs:
    """Compiles each program once, for one device, and keeps it.

    Args:
        device: Where the programs run.
        home: Where their results are committed to lie; None lets them move freely, as those of `jnp.zeros` do.
        counter: Counts the compiles.
    """

    # Programs that depend on the caller's shapes and functions: the least recently used one goes, so that a caller who
    # writes `lease.update(lambda ...)` in a loop pays in compiles, which are counted, and not in memory for ever.
    MAX_CALLERS = 256

    def __init__(self, device: Any, home: jax.sharding.Sharding | None, counter: CompileCounter) -> None:
        self._device = device
        self._options: dict[str, Any] = {} if home is None else {"out_shardings": home}
        self._counter = counter
        self._lock = threading.RLock()
        self._own: dict[Hashable, Program] = {}
        self._callers: OrderedDict[Hashable, Program] = OrderedDict()

    def own(
        self,
        key: Hashable,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate: Sequence[int],
        wide: bool = False,
    ) -> Program:
        """Returns the pool's own program for `key`; their number is bounded by the number of size classes."""
        program = self._own.get(key)
        if program is None:
            with self._lock:  # Two threads that meet here compile once.
                program = self._own.get(key)
                if program is None:
                    program = self._own[key] = self.compile(function, args, donate, wide)
        return program

    def callers(self, key: Hashable, function: Callable[..., Any], args: Sequence[Any]) -> Program:
        """Returns the program for a shape or function of the caller's, its first argument donated."""
        with self._lock:
            program = self._callers.get(key)
            if program is not None:
                self._callers.move_to_end(key)
                return program
        program = self.compile(function, args, (0,), False)  # May trace the caller's code, so not under the lock.
        with self._lock:
            self._callers[key] = program
            while len(self._callers) > self.MAX_CALLERS:
                self._callers.popitem(last=False)
        return program

    def compile(self, function: Callable[..., Any], args: Sequence[Any], donate: Sequence[int], wide: bool) -> Program:
        """Compiles `function` for the shapes of `args`, donating those listed; `wide` where its result has 64 bits."""
        jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True, **self._options)
        # The dtypes of slots, not of a caller's arguments, which follow the mode that he is in.
        wide = wide or any(isinstance(a, jax.ShapeDtypeStruct) and a.dtype.name in WIDE for a in args)
        contexts = (*undisturbed(), jax.default_device(self._device), self._counter.watch())
        if wide:  # A float64 slot outlives the x64 mode that it was made in.
            contexts = (*contexts, jax.enable_x64(True))
        return within(contexts, lambda: jitted.lower(*args).compile())
