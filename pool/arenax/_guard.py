"""The compile guard: what was compiled inside a pool's steps, and what to write where that does not end."""

import threading
import warnings
from typing import TYPE_CHECKING, Any

import attrs

from ._call_site import caller
from ._request import Ragged
from ._size_classes import SizeClasses

if TYPE_CHECKING:
    from ._batch import Planner

# Of one axis of one leaf. Fewer may be the last batch of an epoch, or a few buckets of the user's own.
SHAPES = 8
_CLASSES = 8
_MOST = 1024
# Their frames are between the compiler and the user's line.
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax")


@attrs.frozen
class Compile:
    """One kind of program that was compiled inside steps.

    Attributes:
        function: Name of the function.
        shapes: What its step had drawn by then: ``("float32[8,128]", "int32[8]")``.
        call_site: The line that called it.
        count: How often it was compiled.
    """

    function: str
    shapes: tuple[str, ...]
    call_site: str
    count: int

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.function} for {', '.join(self.shapes) or 'nothing drawn'} at {self.call_site}{times}"


class CompileGuard:
    """Keeps what was compiled inside a pool's steps.

    Args:
        pool_name: The pool's name in messages.

    Attributes:
        steps: Steps begun.
    """

    def __init__(self, pool_name: str) -> None:
        self.steps = 0
        self._pool_name = pool_name
        self._lock = threading.RLock()  # A finalizer may compile, too.
        self._counts: dict[tuple[str, tuple[str, ...], str], int] = {}
        self._warned = False

    def note(self, function: str, shapes: tuple[str, ...]) -> None:
        """Counts a program, compiled just now in this thread."""
        filename, line = caller(_LIBRARIES)
        key = (function, shapes, f"{filename}:{line}")
        with self._lock:
            if key in self._counts or len(self._counts) < _MOST:
                self._counts[key] = self._counts.get(key, 0) + 1

    def compiles(self) -> tuple[Compile, ...]:
        """What was compiled, in order of its first time."""
        return tuple(Compile(*key, count) for key, count in [*self._counts.items()])

    def advise(self, planner: "Planner") -> None:
        """Warns, once, where the shapes of what is drawn do not repeat; called where a step has compiled something."""
        if self._warned:
            return
        for treedef, leaves in planner.varieties():
            growing = {i: found for i, leaf in enumerate(leaves) if (found := leaf.growing()) is not None}
            if growing:
                self._warned = True
                warnings.warn(self._advice(treedef, leaves, growing), RuntimeWarning, stacklevel=4)
                return

    def _advice(self, treedef: Any, leaves: list["Variety"], growing: dict[int, tuple[int, set[int]]]) -> str:
        what = ", ".join(
            f"{len(sizes)} shapes in {self.steps} steps on axis {axis} of {leaves[i].name}"
            for i, (axis, sizes) in growing.items()
        )
        written: list[Any] = [leaf.declared for leaf in leaves]
        for i, (axis, sizes) in growing.items():
            boundaries = list(SizeClasses.fit(sizes, _CLASSES).boundaries)
            written[i] = _Code(_ragged(axis, boundaries))
        return (
            f"pool {self._pool_name!r} sees {what}, and what is called with them is compiled anew for each. Give "
            f"BufferPool(ragged={treedef.unflatten(written)!r}), with a boundary for the longest that will ever come, "
            "and pass the sizes to your function: step.put(batch, with_sizes=True). This warning comes once"
        )


class Variety:
    """The sizes that one leaf was seen with, axis by axis.

    Args:
        name: The leaf's, in messages.
        rank: How many axes it has.
        ragged: The axis that is declared ragged, or None.

    Attributes:
        name: The leaf's name.
        declared: What `ragged` has for it, to be written again.
    """

    __slots__ = ("_sizes", "declared", "name")

    def __init__(self, name: str, rank: int, ragged: Ragged | None) -> None:
        self.name = name
        self.declared = None
        if ragged is not None:
            self.declared = _Code(_ragged(ragged.axis, list(ragged.size_classes.boundaries), ragged.pad_value))
        self._sizes: list[set[int]] = [] if ragged is not None else [set() for _ in range(rank)]

    def add(self, shape: tuple[int, ...]) -> None:
        """Notes a shape."""
        for sizes, size in zip(self._sizes, shape, strict=False):
            if len(sizes) < _MOST:
                sizes.add(size)

    def growing(self) -> tuple[int, set[int]] | None:
        """The axis that has the most sizes, and these, where they are many."""
        if not self._sizes:
            return None
        axis, sizes = max(enumerate(self._sizes), key=lambda pair: len(pair[1]))
        return (axis, {*sizes}) if len(sizes) >= SHAPES else None


def _ragged(axis: int, boundaries: list[int], pad_value: Any = 0) -> str:
    pad = "" if isinstance(pad_value, int) and pad_value == 0 else f", pad_value={pad_value!r}"
    return f"arenax.Ragged({axis}, arenax.SizeClasses.explicit({boundaries}){pad})"


class _Code(str):
    """A text that is its own `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
