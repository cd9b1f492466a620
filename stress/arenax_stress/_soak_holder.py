"""What a thread of a soak holds, how it verifies that, and the batches that it draws."""

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import jax
import numpy as np

from ._soak_ledger import Held, Ledger, Wrong
from ._soak_places import parts_of
from ._soak_values import BOUNDARIES, RAGGED, Source, difference, pattern, source

# Donates its argument, so that the result lies in the slot's own memory.
_eat = jax.jit(lambda x: x, donate_argnums=0)


class Holder:
    """Arrays with what they must hold.

    Args:
        ledger: What the threads share.
        thread: Number of this thread.
        omit: Operations to leave out.
        cap: Arrays to hold at most.

    Attributes:
        operation: Number of the present operation.
        verified_bytes: Bytes read back and compared.
        verified_count: Arrays read back and compared.
    """

    def __init__(self, ledger: Ledger, thread: int, omit: Collection[str], cap: int = 10) -> None:
        self.operation = 0
        self.verified_bytes = 0
        self.verified_count = 0
        self._ledger = ledger
        self._pool = ledger.pool
        self._thread = thread
        self._omit = omit
        self._cap = cap
        self._place = ledger.place
        self._held: list[Held] = []
        self._stale: list[tuple[Any, np.ndarray[Any, Any], str]] = []

    def _here(self, what: str) -> str:
        return f"{what} of thread {self._thread}, operation {self.operation}"

    def _compare(self, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], whose: str) -> None:
        wrong = difference(got, expected)
        if wrong:
            raise Wrong(f"{whose}: {wrong}")
        self.verified_bytes += expected.nbytes
        self.verified_count += 1

    def _read_back(self, array: Any, expected: np.ndarray[Any, Any], whose: str) -> None:
        for where, part in parts_of(array):
            self._compare(part, expected[where], whose)

    def _verify(self, held: Held) -> None:
        if isinstance(held.array, np.ndarray):
            self._compare(held.array, held.expected, held.born)
        else:
            self._read_back(held.array, held.expected, held.born)

    def _hold(self, held: Held) -> None:
        self._held.append(held)

    def _claim(self, array: Any, expected: np.ndarray[Any, Any], what: str, lent: bool = False) -> None:
        born = self._here(what)
        self._hold(Held(array, expected, born, self._ledger.claim(array, born), lent))

    def _pop(self, rng: Random, lent: bool = False) -> Held | None:
        found = [i for i, held in enumerate(self._held) if held.lent or not lent]
        return self._held.pop(found[rng.randrange(len(found))]) if found else None

    def _let_go(self, held: Held) -> None:
        self._verify(held)
        self._ledger.release(held.address)

    def _make_room(self, rng: Random) -> None:
        while len(self._held) >= self._cap:
            held = self._pop(rng)
            assert held is not None
            self._let_go(held)

    def _batch(self, rng: Random) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[Source]]:
        """Returns a batch, what must come of it (values and extent for each leaf), and the sources."""
        batch: dict[str, list[Any]] = {group: [] for group in RAGGED}
        expected: dict[str, list[Any]] = {group: [] for group in RAGGED}
        sources: list[Source] = []
        device_share = rng.choice((0.0, 0.0, 0.0, 1.0))
        for kind in rng.choice(self._ledger.batches):
            from_device = rng.random() < device_share
            # A source on the device compiles a program for its own shape, so that few shapes will do.
            extent = rng.choice((2, *BOUNDARIES)) if from_device else rng.randint(0, rng.choice(BOUNDARIES))
            value = pattern(kind.dtype, kind.at(extent), rng)
            sources.append(source(value, rng, float(from_device)))
            batch[kind.group].append(sources[-1].value)
            expected[kind.group].append((kind.padded(value), None if kind.axis is None else extent))
        return batch, expected, sources

    def _draw(self, rng: Random, put: Callable[..., Any]) -> list[tuple[Any, np.ndarray[Any, Any]]]:
        """Puts a batch, overwrites its sources, and returns each array with what it must hold."""
        batch, expected, sources = self._batch(rng)
        sizes: dict[str, list[Any]] = {}
        with_sizes = rng.random() < 0.3
        where = self._place.draw(rng, None)
        if with_sizes:
            arrays, sizes = put(batch, with_sizes=True, **where)
        else:
            arrays = put(batch, **where)
        for leaf in sources:
            leaf.scribble()
        result: list[tuple[Any, np.ndarray[Any, Any]]] = []
        for group, leaves in expected.items():
            if len(arrays[group]) != len(leaves):
                raise Wrong(f"{len(leaves)} leaves went in, {len(arrays[group])} came out")
            for i, (value, extent) in enumerate(leaves):
                result.append((arrays[group][i], value))
                if with_sizes and extent is None and sizes[group][i] is not None:
                    raise Wrong(f"a leaf that is not ragged has the size {sizes[group][i]}")
                if with_sizes and extent is not None:
                    self._compare(np.array(sizes[group][i]), np.array(extent, np.int32), self._here("the size"))
        return result

    def _take(self, array: Any, expected: np.ndarray[Any, Any], address: tuple[int, ...] | None, born: str) -> None:
        """Donates an array away; its memory belongs to the result from then on."""
        self._ledger.release(address)
        result = _eat(array)
        self._hold(Held(result, expected, born, self._ledger.claim(result, born, pooled=False)))

    def _remember(self, array: Any, expected: np.ndarray[Any, Any], born: str) -> None:
        """Keeps an array by mistake, after its slot went back."""
        self._stale.append((array, expected.copy(), born))
        del self._stale[:-8]
