"""What a pool can be asked to do, each in a few lines that verify what they got: for tests that make it fail."""

import contextlib
import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np

import arenax
from arenax.testing import FakeArray, FakeDevice
from arenax_adapters.loop import pooled
from arenax_adapters.prefetch import prefetch

from .conftest import donate, pool_on, view

CLASSES = arenax.SizeClasses.explicit([2, 4, 8])
PAD = 3
SLOTS_RESERVED = 10
_tags = itertools.count(1)
_landings: dict[str, Any] = {}


@attrs.define
class Seen:
    """What an operation got before it was struck.

    Attributes:
        array: An array.
        expected: What it held then.
        lent: Whether it must hold that for as long as it lives; else it may also be deleted.
    """

    array: Any
    expected: np.ndarray[Any, Any]
    lent: bool


@attrs.define
class Bench:
    """A pool and what was got from it."""

    pool: arenax.BufferPool
    seen: list[Seen] = attrs.field(factory=list)

    def see(self, array: Any, expected: Any, lent: bool = True) -> None:
        """Verifies an array, and remembers it."""
        expected = np.asarray(expected)
        self.seen.append(Seen(array, expected, lent))
        np.testing.assert_array_equal(read(array), expected)

    def verify(self) -> None:
        """No array shows another batch."""
        for seen in self.seen:
            if seen.lent or not seen.array.is_deleted():
                np.testing.assert_array_equal(read(seen.array), seen.expected)


def read(array: Any) -> np.ndarray[Any, Any]:
    """A copy of an array's values; `numpy.asarray` of a `jax.Array` would leave a view of the memory in it."""
    return np.array(array if isinstance(array, FakeArray) else array.addressable_data(0))


def values(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Values that no other call gives."""
    tag = next(_tags)
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) + tag * 100).astype(dtype)


def batch(*fixed: Any, rag: Any = ()) -> dict[str, Any]:
    return {"fix": [*fixed], "rag": [*rag]}


def put_fixed(bench: Bench) -> None:
    x = values(4)
    bench.see(bench.pool.put(batch(x))["fix"][0], x)


def put_again_and_again(bench: Bench) -> None:
    """The slot of the last batch goes out again at once."""
    for _ in range(3):
        x = values(4)
        got = bench.pool.put(batch(x))["fix"][0]
        np.testing.assert_array_equal(read(got), x)
        del got


def put_three(bench: Bench) -> None:
    xs = values(4), values(2, 3, dtype="int32"), values()
    got = bench.pool.put(batch(*xs))
    for array, x in zip(got["fix"], xs, strict=True):
        bench.see(array, x)


def put_three_again(bench: Bench) -> None:
    for _ in range(2):
        xs = values(4), values(4), values(2, 3, dtype="int32")
        got = bench.pool.put(batch(*xs))
        for array, x in zip(got["fix"], xs, strict=True):
            np.testing.assert_array_equal(read(array), x)
        del got, array


def put_ragged(bench: Bench) -> None:
    fix, rag = values(3), values(3, 2)
    padded = np.full((4, 2), PAD, np.float32)
    padded[:3] = rag
    got, sizes = bench.pool.put(batch(fix, rag=[rag]), with_sizes=True)
    bench.see(got["fix"][0], fix)
    bench.see(got["rag"][0], padded)
    bench.see(sizes["rag"][0], np.int32(3))


def put_from_device(bench: Bench) -> None:
    x, y = values(4), values(3, 2)
    got = bench.pool.put(batch(jnp.asarray(x), rag=[jnp.asarray(y)]))
    bench.see(got["fix"][0], x)
    np.testing.assert_array_equal(read(got["rag"][0])[:3], y)


def put_after_donation(bench: Bench) -> None:
    """The slot comes back without its buffer."""
    got = bench.pool.put(batch(values(4)))["fix"][0]
    donate(got)
    del got
    x = values(4)
    bench.see(bench.pool.put(batch(x))["fix"][0], x)


def put_under_a_view(bench: Bench) -> None:
    """The slot moves, since a view of its last array is alive."""
    got = bench.pool.put(batch(values(4)))["fix"][0]
    held = view(got)
    del got
    x = values(4)
    bench.see(bench.pool.put(batch(x))["fix"][0], x)
    del held


def step_put(bench: Bench) -> None:
    xs = values(4), values(2, 3, dtype="int32")
    with bench.pool.step() as step:
        got = step.put(batch(*xs))
        for array, x in zip(got["fix"], xs, strict=True):
            bench.see(array, x, lent=False)
        x = values(4)
        bench.see(step.put(batch(x))["fix"][0], x, lent=False)


def step_factories(bench: Bench) -> None:
    with bench.pool.step() as step:
        bench.see(step.zeros((4,)), np.zeros(4), lent=False)
        bench.see(step.full((4,), 7, "int32"), np.full(4, 7), lent=False)
        bench.see(step.arange(4), np.arange(4), lent=False)
        bench.see(step.eye(2), np.eye(2), lent=False)
        step.empty((4,))


def step_keep(bench: Bench) -> None:
    xs = values(4), values(4)
    with bench.pool.step() as step:
        got = step.put(batch(*xs))["fix"]
        step.keep(got)
        bench.see(step.ones((4,)), np.ones(4), lent=False)
    for array, x in zip(got, xs, strict=True):
        bench.see(array, x)


def step_loop(bench: Bench) -> None:
    run = pooled(lambda state, got: state + read(got["fix"][0]).sum(), bench.pool)
    x = values(4)
    assert run(0.0, batch(x)) == x.sum()


def step_that_raises(bench: Bench) -> None:
    with contextlib.suppress(ZeroDivisionError), bench.pool.step() as step:
        step.put(batch(values(4)))
        raise ZeroDivisionError


def lease_life(bench: Bench) -> None:
    rows = values(2, 3)
    with bench.pool.lease((4, 3)) as lease:
        lease.append(rows)
        lease.write(rows, at=(2, 0))
        np.testing.assert_array_equal(read(lease.array), np.concatenate([rows, rows]))
        lease.update(_double)
        np.testing.assert_array_equal(read(lease.array), 2 * np.concatenate([rows, rows]))
        lease.fill(5)
        bench.see(lease.array, np.full((4, 3), 5, np.float32), lent=False)


def lease_and_release(bench: Bench) -> None:
    for fill in (1, None):
        lease = bench.pool.lease((4,), fill=fill)
        if fill:
            bench.see(lease.array, np.ones(4), lent=False)
        lease.release()


def lease_detach(bench: Bench) -> None:
    lease = bench.pool.lease((4,), fill=3)
    array = lease.detach()
    bench.see(array, np.full(4, 3))


def lease_dropped(bench: Bench) -> None:
    lease = bench.pool.lease((4,), "int32", fill=3)
    bench.see(lease.array, np.full(4, 3), lent=False)
    del lease


def reserve(bench: Bench) -> None:
    spec = batch(arenax.ArraySpec((4,), "float32"), rag=[arenax.ArraySpec((8, 2), "float32")])
    before = bench.pool.stats()
    bench.pool.reserve(spec, slots=2)
    assert bench.pool.stats().slot_count == before.slot_count + SLOTS_RESERVED


def trim(bench: Bench) -> None:
    x = values(4)
    got = bench.pool.put(batch(x))["fix"][0]
    bench.pool.lease((3,)).release()
    assert bench.pool.trim() >= 12
    bench.see(got, x)


def record(bench: Bench) -> None:
    with bench.pool.record() as trace:
        x = values(4)
        got = bench.pool.put(batch(x))["fix"][0]
        np.testing.assert_array_equal(read(got), x)
        del got
        bench.pool.lease((3,)).release()
    assert [e.action for e in trace if e.size == 16][-2:] == ["allocate", "free"]
    assert [e.action for e in trace if e.size == 12][-2:] == ["allocate", "free"]


def convert_in_place(bench: Bench) -> None:
    for x in (values(4), values(2, 2, dtype="int32"), values(4)):
        got = bench.pool.put(batch(x))["fix"][0]
        np.testing.assert_array_equal(read(got), x)
        del got


def ahead(bench: Bench) -> None:
    xs = [values(4) for _ in range(3)]
    with prefetch((batch(x) for x in xs), bench.pool, size=1) as batches:
        for x, got in zip(xs, batches, strict=True):
            bench.see(got["fix"][0], x)
        del got


def ahead_and_closed(bench: Bench) -> None:
    batches = prefetch((batch(values(4)) for _ in range(9)), bench.pool, size=2)
    next(batches)
    batches.close()


def ahead_and_dropped(bench: Bench) -> None:
    batches = prefetch((batch(values(4)) for _ in range(9)), bench.pool, size=2)
    next(batches)
    del batches


def steady(bench: Bench) -> None:
    put_again_and_again(bench)
    with bench.pool.steady():
        put_again_and_again(bench)


def not_steady(bench: Bench) -> None:
    with contextlib.suppress(arenax.NotSteady), bench.pool.steady():
        bench.pool.lease((next(_tags),), "uint8")


def check(bench: Bench) -> None:
    held = bench.pool.put(batch(values(4)))
    bench.pool.check()
    del held
    bench.pool.check()


def stats(bench: Bench) -> None:
    held = bench.pool.put(batch(values(4)))
    assert bench.pool.stats().leased_count >= 1
    del held
    bench.pool.stats()
    repr(bench.pool)


def spill(bench: Bench) -> None:
    """One slot, two at once: the second is a fresh array outside of the pool."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        xs = values(4), values(4)
        for x in xs:
            bench.see(bench.pool.put(batch(x))["fix"][0], x)
        with bench.pool.step() as step:
            bench.see(step.put(batch(xs[0]))["fix"][0], xs[0], lent=False)
        with bench.pool.lease((4,), fill=1) as lease:
            bench.see(lease.array, np.ones(4), lent=False)
            bench.see(lease.detach(), np.ones(4))


def convert(bench: Bench) -> None:
    """A budget of 40 bytes: each class at the price of the other."""
    for shape in ((4,), (2, 3), (4,), (2, 3)):
        x = values(*shape)
        got = bench.pool.put(batch(x))["fix"][0]
        np.testing.assert_array_equal(read(got), x)
        del got


def wait_in_vain(bench: Bench) -> None:
    got = bench.pool.put(batch(values(4)))
    with contextlib.suppress(arenax.PoolExhausted):
        bench.pool.put(batch(values(4)))
    del got


def refused(bench: Bench) -> None:
    for bad in (batch("text"), batch(rag=[np.zeros((9, 2))])):
        with contextlib.suppress(TypeError, ValueError):
            bench.pool.put(bad)
    with contextlib.suppress(TypeError), bench.pool.lease((4,)) as lease:
        lease.update(_shorten)


def close(bench: Bench) -> None:
    x = values(4)
    held = bench.pool.put(batch(x))["fix"][0]
    lease = bench.pool.lease((4,), fill=2)
    bench.pool.close()
    bench.see(held, x)
    np.testing.assert_array_equal(read(lease.array), np.full(4, 2))
    lease.release()


def landing_of(kind: str) -> Any:
    """One landing for all pools of a kind, so that they share its compiled programs; fake ones compile nothing."""
    if kind == "fake":
        return FakeDevice()
    if kind not in _landings:
        _landings[kind] = pool_on(kind).landing
    return _landings[kind]


def _double(slot: Any) -> Any:
    return slot + slot


def _shorten(slot: Any) -> Any:
    return slot[:0].reshape(0, 1)


@attrs.frozen
class Operation:
    """One operation, and the pool that it is for."""

    run: Callable[[Bench], None]
    options: dict[str, Any] = attrs.field(factory=dict)
    reserved: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    def bench(self, kind: str, landing: Any = None) -> Bench:
        """A new pool; on `landing` where it is given, which has its programs compiled."""
        options = {"ragged": {"fix": None, "rag": arenax.Ragged(0, CLASSES, PAD)}} | self.options
        pool = pool_on(kind, **options) if landing is None else arenax.BufferPool(landing, **options)
        if self.reserved:
            pool.reserve(batch(arenax.ArraySpec((4,), "float32")), slots=1)
        return Bench(pool)


OPERATIONS = {
    operation.name: operation
    for operation in (
        *map(
            Operation,
            (
                put_fixed,
                put_again_and_again,
                put_three,
                put_three_again,
                put_ragged,
                put_from_device,
                put_after_donation,
                put_under_a_view,
                step_put,
                step_factories,
                step_keep,
                step_loop,
                step_that_raises,
                lease_life,
                lease_and_release,
                lease_detach,
                lease_dropped,
                reserve,
                ahead,
                ahead_and_closed,
                ahead_and_dropped,
                steady,
                not_steady,
                trim,
                record,
                check,
                stats,
                refused,
                close,
            ),
        ),
        Operation(spill, {"on_exhausted": "spill"}, reserved=True),
        Operation(convert, {"budget": 40}),
        Operation(convert_in_place, {"budget": 16}),
        Operation(wait_in_vain, {"on_exhausted": "wait", "timeout": 0.0}, reserved=True),
    )
}


@contextlib.contextmanager
def struck(*errors: type[BaseException]) -> Iterator[list[str]]:
    """Swallows such an error and lets go of its frames; says where it came up, innermost last.

    Python itself swallows one in a `__del__`, which counts too.
    """
    places: list[str] = []

    def hook(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, errors):
            before(ignored)
        places.append(f"ignored in {ignored.object!r}")
        traceback.clear_frames(ignored.exc_traceback)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield places
    except errors as e:
        frames = traceback.extract_tb(e.__traceback__)
        places += [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}: {f.line}" for f in frames]
        e.__traceback__ = None
    finally:
        sys.unraisablehook = before


def whole(bench: Bench, operation: Operation) -> None:
    """Verifies, by what the pool says, the device says and its arrays hold, that nothing is lost; then drops all.

    Runs the operation once more in between, which must go as if nothing had been.
    """
    pool = bench.pool
    if operation.run is close:
        pool.close()
        bench.verify()
        bench.seen.clear()
        pool.check()
        said = pool.stats()
        assert (said.slot_count, said.reserved_bytes, said.leased_count, said.leased_bytes) == (0, 0, 0, 0)
        assert_nothing_else_on_device(pool)
        return
    settled(pool)
    bench.verify()
    if operation.run is reserve:  # In full or not at all.
        assert pool.stats().slot_count % SLOTS_RESERVED == 0
    operation.run(Bench(pool))
    x = values(4)
    if not operation.reserved:
        held = pool.put(batch(x))["fix"][0]
        np.testing.assert_array_equal(read(held), x)
        bench.verify()
        del held
    bench.seen.clear()
    said = settled(pool)
    assert (said.leased_count, said.leased_bytes, said.requested_bytes) == (0, 0, 0)
    assert said.slot_count == sum(c.slot_count for c in said.by_class.values())
    assert said.reserved_bytes == sum(c.slot_count * k.nbytes for k, c in said.by_class.items())
    assert said.reserved_bytes == said.idle_bytes
    if said.budget_bytes is not None:
        assert said.peak_reserved_bytes <= said.budget_bytes
    if operation.reserved:
        assert said.slot_count == 1
    assert_nothing_else_on_device(pool)


def settled(pool: arenax.BufferPool) -> arenax.Stats:
    """The figures, when no thread of a dropped `prefetch` is at work any more."""
    deadline = time.monotonic() + 5
    while any(t.name == f"arenax-prefetch-{pool.name}" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread of prefetch goes on for ever"
        time.sleep(0.001)
    pool.check()
    for shelf in pool.arena.shelves.values():
        for slot in shelf.slots:
            # A landing trusts the view where the address is the recorded one, and would write to memory of others.
            if slot.view is not None and not slot.array.is_deleted():
                address = slot.array.unsafe_buffer_pointer()
                assert address != slot.address or address == slot.view.ctypes.data, "a view of other memory"
    return pool.stats()


def assert_nothing_else_on_device(pool: arenax.BufferPool) -> None:
    if isinstance(pool.landing, FakeDevice):
        assert pool.landing.bytes_in_use == pool.stats().reserved_bytes
