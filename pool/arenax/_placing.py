"""The programs that move a stage to the device and place it in a slot, in the form that the device takes."""

import threading
from collections.abc import Sequence
from typing import Any

import attrs
import jax
import numpy as np
from jax import lax

from ._cuts import Cut, Start
from ._donation import struct
from ._programs import WIDE, Program, Programs, run
from ._request import INT32, SizeClass
from ._stages import Stage, StageKind, Stages

_TOKEN = SizeClass((), INT32)
_TRIAL = Cut(SizeClass((2,), INT32), 0, SizeClass((1,), INT32))


@attrs.frozen(eq=False)
class Mover:
    """Moves a filled stage into slots.

    Attributes:
        kind: The stages that it takes.
        program: ``((slots, carried), inputs)`` to ``(slots, carried)``, the first pair donated. In the split form
            ``(carried, inputs)`` to ``carried``.
        place: In the split form, ``(slot, carried)`` to the slot, which is donated; else None.
    """

    kind: StageKind
    program: Program
    place: Program | None = None

    @property
    def commits(self) -> bool:
        """Whether it leaves the slots committed to the device."""
        return self.place is None

    def __call__(self, stage: Stage, start: Start, slots: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns what the slots have become; `start` is where the block goes, where there are several."""
        if len(stage.views) > len(slots):
            stage.views[-1][...] = start
        if self.place is None:
            results, stage.carried = run(self.program, (tuple(slots), stage.carried), stage.inputs)
            return results
        stage.carried = run(self.program, stage.carried, stage.inputs)
        return (run(self.place, *slots, stage.carried),)


class Placer:
    """Makes movers.

    A block is placed in one of two forms. Fused: one program moves it from the stage into the slot. Split: one moves it
    into a buffer on the device and a second one places it, for compilers that refuse an update-slice between two kinds
    of memory (openxla/xla#47362). In both, the program that reads the stage is given device buffers that it returns:
    they are the stage's fence, and since they are donated nothing is allocated. The start lies in the stage too, so
    that no call passes host values, which would each be a transfer of their own.

    Args:
        programs: Compiles.
        stages: Makes the stages of the trial.
        form: The form, or None to try.
    """

    def __init__(self, programs: Programs, stages: Stages, form: str | None) -> None:
        if form not in (None, "fused", "split"):
            raise ValueError(f"form must be None, 'fused' or 'split', got {form!r}")
        self.form = form
        self._programs = programs
        self._stages = stages
        self._trial = threading.RLock()  # A signal handler may land too.

    def whole(self, classes: Sequence[SizeClass]) -> Mover:
        """Returns the mover of one block for each class, which is all of it: nothing is placed."""

        def arenax_land(owned: Any, inputs: Sequence[jax.Array]) -> Any:
            return tuple([jax.device_put(x, jax.memory.Space.Device) for x in inputs]), owned[1]

        kind = StageKind(tuple(classes), (_TOKEN,))
        args = ((_structs(classes), _structs(kind.carried)), self._pinned(kind))
        wide = any(c.dtype.name in WIDE for c in classes)
        return Mover(kind, self._programs.own(("land", *classes), arenax_land, args, (0,), wide))

    def block(self, cut: Cut) -> Mover:
        """Returns the mover of one block of a class that has several."""
        if self.form is None:
            with self._trial:
                self.form = self.form or ("fused" if self._takes_the_fused_form() else "split")
        return self._fused(cut) if self.form == "fused" else self._split(cut)

    def _fused(self, cut: Cut) -> Mover:
        def arenax_land_block(owned: Any, inputs: Sequence[jax.Array]) -> Any:
            ((slot,), carried) = owned
            return (_place(slot, *[jax.device_put(x, jax.memory.Space.Device) for x in inputs]),), carried

        kind = StageKind((cut.block, _start_of(cut)), (_TOKEN,))
        args = ((_structs([cut.size_class]), _structs(kind.carried)), self._pinned(kind))
        wide = cut.block.dtype.name in WIDE
        return Mover(kind, self._programs.own(("land block", cut), arenax_land_block, args, (0,), wide))

    def _split(self, cut: Cut) -> Mover:
        def arenax_bring(_: Any, inputs: Sequence[jax.Array]) -> Any:
            return tuple([jax.device_put(x, jax.memory.Space.Device) for x in inputs])

        def arenax_place(slot: jax.Array, carried: Any) -> jax.Array:
            return _place(slot, *carried)

        inputs = (cut.block, _start_of(cut))
        kind = StageKind(inputs, inputs)
        wide = cut.block.dtype.name in WIDE
        brings = (_structs(kind.carried), self._pinned(kind))
        places = (struct(cut.size_class), _structs(kind.carried))
        return Mover(
            kind,
            self._programs.own(("bring", kind), arenax_bring, brings, (0,), wide),
            self._programs.own(("place", cut), arenax_place, places, (0,), wide),
        )

    def _takes_the_fused_form(self) -> bool:
        """Compiles and runs it on a tiny class, and looks at the result."""
        stage = self._stages.make(StageKind((_TRIAL.block, _start_of(_TRIAL)), (_TOKEN,)))
        slot = self._stages.fresh(_TRIAL.size_class, pinned=False)
        stage.views[0][...] = 7
        try:
            (result,) = self._fused(_TRIAL)(stage, (1,), (slot,))
            with jax.transfer_guard("allow"):
                return np.asarray(result).tolist() == [0, 7]
        except Exception:
            return False

    def _pinned(self, kind: StageKind) -> tuple[jax.ShapeDtypeStruct, ...]:
        pinned = self._stages.pinned
        return tuple([jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=pinned) for c in kind.inputs])


def _place(slot: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(slot, block, [start[i] for i in range(slot.ndim)])


def _start_of(cut: Cut) -> SizeClass:
    return SizeClass((len(cut.block.shape),), INT32)


def _structs(classes: Sequence[SizeClass]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple([struct(c) for c in classes])
