"""Debug mode: what is returned is poisoned before it is lent again, and the lines that drew it are kept."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arena import Arena
from ._call_site import caller
from ._errors import ArenaxError, PoolExhausted
from ._landing import Landing, SlotLost
from ._request import SizeClass
from ._slot import Holder, Loan, Shelf, Slot
from ._trace_leases import trace_leases
from ._waiters import CancelToken

VARIABLE = "ARENAX_DEBUG"


class Quarantine(Holder):
    """Holds a slot that was returned and is not poisoned yet."""

    __slots__ = ()

    kind = "the poisoning of debug mode"


def is_debugging(debug: bool | None) -> bool:
    """Whether a pool with this `debug` argument is in debug mode: None is as the environment says.

    Raises:
        TypeError: For anything but a bool or None.
        ValueError: Where the environment variable is neither 0 nor 1.
    """
    if debug is None:
        value = os.environ.get(VARIABLE, "0")
        if value not in ("", "0", "1"):
            raise ValueError(f"the environment variable {VARIABLE} must be 0 or 1, got {value!r}")
        return value == "1"
    if not isinstance(debug, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"debug must be True, False, or None for what {VARIABLE} says, got {debug!r}")
    return debug


def poison(size_class: SizeClass) -> Any:
    """What a returned slot is filled with: NaN, or the largest integer, or True."""
    dtype = size_class.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(jnp.nan).astype(dtype)[()]
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max).astype(dtype)[()]
    return np.True_


class DebugArena(Arena):
    """An arena in which a return goes into quarantine, until the next call, which poisons it outside of the lock.

    So an array that is used after its return raises, or shows the poison, from the next call on; and undefined contents
    (``fill=None``) are seen to be undefined.
    """

    def __init__(self, landing: Landing, *, name: str, mode: str, budget: int | None, timeout: float | None) -> None:
        super().__init__(landing, name=name, mode=mode, budget=budget, timeout=timeout)
        self._landing = landing
        self._quarantine: deque[tuple[Loan, Quarantine, str | None]] = deque()
        self._tracing: AbstractContextManager[None] = trace_leases()
        self._tracing.__enter__()

    def checkout(
        self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan, cancel: CancelToken | None = None
    ) -> list[Slot]:
        """As `Arena.checkout`, once all that has come back is poisoned."""
        self.settle()
        while True:
            try:
                return super().checkout(shelves, requested, loan, cancel)
            except PoolExhausted:
                if not self._quarantine:  # What came back just now would have served it.
                    raise
                self.settle()

    def settle(self, returns: Sequence[Loan] = ()) -> None:
        """As `Arena.settle`; poisons what has come back."""
        super().settle(returns)
        while self._quarantine:
            try:
                loan, holder, site = self._quarantine.popleft()
            except IndexError:  # Another thread took it.
                return
            try:
                for slot in loan.slots:
                    self._poison(slot, site)
            finally:
                super().settle([loan])
            del holder

    def snapshot(self, read: Callable[[], Any]) -> Any:
        """As `Arena.snapshot`, after `settle`."""
        self.settle()
        return super().snapshot(read)

    def check(self) -> None:
        """As `Arena.check`, after `settle`."""
        self.settle()
        super().check()

    def close(self) -> None:
        """As `Arena.close`; ends the tracing."""
        super().close()
        self._quarantine.clear()
        self._tracing.__exit__(None, None, None)

    def _poison(self, slot: Slot, site: str | None) -> None:
        if self.closed or slot.array is None or not self._landing.is_whole(slot):
            return  # The next borrower gets a new buffer.
        dirt = self._dirt(slot)
        if dirt:
            where = f", drawn at {site}," if site else ""
            message = f"the padding of an array of {slot.size_class}{where} was overwritten: {dirt}"
            warnings.warn_explicit(message, RuntimeWarning, *caller())
        try:
            self._landing.fill(slot, poison(slot.size_class))
        except (SlotLost, ArenaxError):
            pass

    def _dirt(self, slot: Slot) -> str:
        """Says where a padding that is known no longer holds its value; empty where all is well."""
        if slot.contents is None or not slot.shelf.nbytes:
            return ""
        axis, extent, pad = slot.contents
        with jax.transfer_guard("allow"):
            values = (
                np.array(slot.array)[(slice(None),) * axis + (slice(extent, None),)] if slot.size_class.shape else ()
            )
        if not np.size(values):
            return ""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1, len(pad))
        wrong = np.flatnonzero((raw != np.frombuffer(pad, np.uint8)).any(axis=1))
        return f"{wrong.size} of {len(raw)} elements from {extent} on along axis {axis}" if wrong.size else ""

    def _pass_on(
        self,
        shelves: Sequence[Shelf],  # noqa: ARG002
        requested: Sequence[int],  # noqa: ARG002
        loan: Loan,  # noqa: ARG002
        thread: int,  # noqa: ARG002
    ) -> None:
        self._settle()
        return None

    def _end(self, loan: Loan) -> None:
        is_over = isinstance(loan(), Quarantine) or loan.token is Quarantine
        coming = [s for s in getattr(loan, "slots", ()) if s.loan is loan and not s.spilled and s.array is not None]
        super()._end(loan)
        if is_over:
            return
        for slot in coming:
            slot.shelf.free.remove(slot)
            holder = Quarantine()
            kept = self.loan(holder, Quarantine)
            kept.slots = [slot]
            slot.loan = kept
            self._quarantine.append((kept, holder, loan.site))
