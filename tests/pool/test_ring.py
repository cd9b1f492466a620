"""The pinned ring: no memory of its own, few programs, stages behind fences, and values right whatever happens."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arenax
import arenax._placing as placing
import arenax._ring as ring
from arenax import SizeClass
from arenax._compiles import CompileCounter
from arenax._cuts import Cut
from arenax._landing import Rag
from arenax._placing import Placer
from arenax._ring import PinnedRing
from arenax._stages import Ring, StageKind, Stages

from .conftest import address

DEVICES = jax.devices()
FLOAT = np.dtype(np.float32)
TOKEN = SizeClass((), np.dtype(np.int32))
DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "float16",
    "float32",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
]
forms = pytest.mark.parametrize("form", ["fused", "split"])


class RingPool(arenax.BufferPool):
    """A pool that lands by small stages, so that leaves of a few numbers pass in blocks.

    Attributes:
        ring: Its landing.
    """

    def __init__(
        self,
        chunk_bytes: int = 64,
        form: str | None = None,
        depth: int = 2,
        committed: bool = False,
        **options: Any,
    ) -> None:
        self.ring = PinnedRing(DEVICES[0], committed, CompileCounter(), chunk_bytes=chunk_bytes, depth=depth, form=form)
        super().__init__(self.ring, **options)


def numbers(shape: tuple[int, ...], first: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(math.prod(shape)) + first).astype(np.float32).reshape(shape)


def random_bits(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(0)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    return np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def programs_of(pool: RingPool) -> dict[Any, Any]:
    return pool.ring._programs._own


def count_programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that move and place, as they are called from now on."""
    called: list[Any] = []
    real = placing.run

    def run(program: Any, *args: Any) -> Any:
        called.append(program)
        return real(program, *args)

    monkeypatch.setattr(placing, "run", run)
    return called


# ---------------------------------------------------------------------------------------------------------------- cuts


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from([1, 2, 8, 16]), st.integers(16, 200))
def test_blocks_fit_a_stage_and_cover_every_element(shape: list[int], itemsize: int, chunk_bytes: int) -> None:
    size_class = SizeClass(tuple(shape), np.dtype(f"V{itemsize}"))
    cut = Cut.of(size_class, chunk_bytes)
    assert cut.block.nbytes <= chunk_bytes
    covered = np.zeros(shape, int)
    for start in cut.starts(None, 0):
        assert all(0 <= i <= n - b for i, n, b in zip(start, shape, cut.block.shape, strict=True))
        covered[tuple(slice(i, i + b) for i, b in zip(start, cut.block.shape, strict=True))] += 1
    assert covered.all()
    if cut.axis is not None and covered.size:  # Blocks are about as large as they can be, and overlap little.
        assert cut.block.nbytes * 4 > chunk_bytes
        assert covered.mean() < 1.5


@given(st.tuples(*[st.integers(1, 6)] * 3), st.integers(0, 2), st.integers(0, 6), st.integers(16, 100))
def test_a_ragged_leafs_blocks_cover_what_is_dirty_and_few_more(
    shape: tuple[int, ...], axis: int, end: int, chunk_bytes: int
) -> None:
    end = min(end, shape[axis])
    cut = Cut.of(SizeClass(shape, FLOAT), chunk_bytes)
    covered = np.zeros(shape, bool)
    for start in cut.starts(Rag(axis, 0, np.float32(0)), end):
        covered[tuple(slice(i, i + b) for i, b in zip(start, cut.block.shape, strict=True))] = True
    covered = np.moveaxis(covered, axis, 0)
    assert covered[:end].all()
    assert not covered[max(end, 1) + cut.block.shape[axis] - 1 :].any()


def test_an_element_larger_than_a_stage_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="one element"):
        Cut.of(SizeClass((3,), np.dtype("V32")), 16)


# ------------------------------------------------------------------------------------------------------ right, in place


@forms
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (70,), (3, 40), (2, 3, 50)], ids=str)
def test_every_bit_of_every_dtype_lands_in_place(form: str, name: str, shape: tuple[int, ...]) -> None:
    value = random_bits(jnp.dtype(name), shape)
    with RingPool(form=form) as pool:
        seen = set()
        for source in (value, np.zeros_like(value), value):
            with pool.step() as step:
                x = step.put(source)
                assert np.asarray(x).tobytes() == source.tobytes()
                seen.add(address(x))
                del x
        assert len(seen) == 1
        assert pool.stats().copy_count == 0
        temporaries = [p.memory_analysis().temp_size_in_bytes for p in programs_of(pool).values()]
        assert temporaries == [0] * len(temporaries)


@pytest.mark.parametrize("name", ["int64", "float64", "complex128"])
@forms
def test_wide_dtypes_land_whole_whatever_the_mode(form: str, name: str) -> None:
    with jax.enable_x64(True), RingPool(form=form) as pool:
        for shape in ((3,), (40,)):
            value = (numbers(shape) / 3 + 2.0**40).astype(name)
            for _ in range(2):
                x = pool.put(value)
                assert np.asarray(x).tobytes() == value.tobytes()
                del x
        (slot,) = pool.arena.shelves[SizeClass((40,), np.dtype(name))].slots
        landing = pool.ring
        prepared = landing.prepare([slot.size_class])
        with jax.enable_x64(False):
            landing.land(prepared, [slot], [value * 2], None)
        assert np.asarray(slot.array).tobytes() == (value * 2).tobytes()


@pytest.mark.parametrize("chunk_bytes", [16, 52, 64, 100, 4096])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_any_chunk_size_and_depth(chunk_bytes: int, depth: int) -> None:
    with RingPool(chunk_bytes, depth=depth) as pool:
        for shape in ((101,), (7, 11), (3, 5, 7)):
            for i in range(3):
                x = pool.put(numbers(shape, i))
                np.testing.assert_array_equal(x, numbers(shape, i))
                del x


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        np.asfortranarray,
        lambda x: x.astype(">f4"),
        lambda x: x[::-1, ::-1],
        lambda x: x.T.copy().T,
        lambda x: x.astype(np.float64),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["c", "fortran", "swapped", "negative", "transposed", "double", "broadcast"],
)
def test_every_layout_passes_in_blocks(layout: Callable[[Any], Any]) -> None:
    value = layout(numbers((9, 31)))
    with RingPool() as pool:
        np.testing.assert_array_equal(pool.put(value), value.astype(np.float32))


@forms
def test_addresses_stay_over_thousands_of_landings(form: str) -> None:
    with RingPool(form=form) as pool:
        seen = {"small": set[int](), "large": set[int]()}
        batch = {"small": numbers((4,)), "large": numbers((50,))}
        for i in range(2000):
            batch["small"][0] = batch["large"][-1] = i
            with pool.step() as step:
                got = step.put(batch)
                for name, x in got.items():
                    seen[name].add(address(x))
                if i % 500 == 0:
                    for name, x in got.items():
                        np.testing.assert_array_equal(x, batch[name])
                del got, x
        assert {name: len(s) for name, s in seen.items()} == {"small": 1, "large": 1}
        assert pool.stats().copy_count == 0


@pytest.mark.parametrize("committed", [False, True])
@forms
def test_arrays_are_committed_where_they_were_placed(form: str, committed: bool) -> None:
    with RingPool(form=form, committed=committed) as pool:
        for shape in ((3,), (50,)):
            for _ in range(3):
                x = pool.put(numbers(shape))
                assert x.committed == committed
                del x


def test_a_group_passes_by_one_program_and_what_is_too_large_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 leaves of 28 bytes in stages of 64: two and two; and the large one's five blocks.
    batch = [numbers((7,), i) for i in range(4)]
    batch.insert(1, numbers((80,)))
    with RingPool() as pool:
        for _ in range(2):
            called = count_programs(monkeypatch)
            got = pool.put(batch)
            monkeypatch.undo()
            for x, expected in zip(got, batch, strict=True):
                np.testing.assert_array_equal(x, expected)
            del got, x
        assert len(called) == 2 + 5
        assert len({id(p) for p in called}) == 2


# --------------------------------------------------------------------------------------------------------------- ragged


@forms
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("chunk_bytes", [16, 48, 200, 4096])
def test_every_length_after_every_other_on_every_axis(form: str, axis: int, chunk_bytes: int) -> None:
    shape, capacity = [3, 4, 5], 6
    ragged = arenax.Ragged(axis, arenax.SizeClasses.explicit([capacity]), pad_value=-1)
    with RingPool(chunk_bytes, form=form, ragged=ragged) as pool:
        for first in range(0, capacity + 1, 2):
            for second in range(capacity + 1):
                for n in (first, second):
                    shape[axis] = n
                    value = numbers(tuple(shape), 1)
                    x = pool.put(value)
                    widths = [(0, capacity - n if i == axis else 0) for i in range(3)]
                    np.testing.assert_array_equal(x, np.pad(value, widths, constant_values=-1))
                    del x
        assert pool.stats().slot_count == 1


def test_a_short_request_in_a_large_clean_class_moves_only_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = arenax.Ragged(0, arenax.SizeClasses.explicit([160]))
    with RingPool(ragged=ragged) as pool:  # 16 floats to a stage: ten blocks.

        def programs(n: int) -> int:
            x = pool.put(numbers((n,)))
            with monkeypatch.context() as patch:
                called = count_programs(patch)
                del x
                x = pool.put(numbers((n,)))
                del x
            return len(called)

        assert programs(160) == 10
        assert programs(100) == 7  # The first of the two puts cleans up.
        assert [programs(n) for n in (16, 17, 1, 0)] == [1, 2, 1, 1]


@forms
def test_compiles_are_bounded_by_the_classes(form: str) -> None:
    classes = arenax.SizeClasses.explicit([8, 50, 90])
    random = np.random.default_rng(0)
    with RingPool(form=form, ragged=arenax.Ragged(0, classes)) as pool:
        for _ in range(2):
            for n in random.integers(0, 91, 100):
                x = pool.put(numbers((n, 2)))
                del x
            # Fused and uncommitted: to create, to land, and to have the last word.
            assert pool.stats().compile_count <= 3 * len(classes.boundaries)
        with pool.steady():
            for n in range(91):
                x = pool.put(numbers((n, 2)))
                del x


# --------------------------------------------------------------------------------------------------------------- fences


class Gate:
    """A reader of a device array that stands still in the middle of its program until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.result: Any = None

    def read(self, x: jax.Array) -> None:
        def wait(zero: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(60)
            return np.zeros_like(zero)

        def program(x: jax.Array) -> jax.Array:
            return x + jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x.ravel()[0] * 0)

        def work(x: jax.Array) -> None:
            self.result = np.array(jax.jit(program)(x))

        self.thread = threading.Thread(target=work, args=(x,))
        self.thread.start()
        assert self.entered.wait(60)


@forms
@pytest.mark.parametrize("shape", [(16,), (1 << 15,)], ids=["one block", "many blocks"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_stage_is_never_written_before_the_program_that_reads_it_has_finished(
    form: str, shape: tuple[int, ...], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    with RingPool(1 << 12, form=form, depth=depth) as pool:
        pool.reserve(numbers(shape), slots=1)
        with pool.step() as step:
            step.put(numbers(shape))
        for i in range(3):
            gate = Gate()
            with pool.step() as step:
                x = step.put(numbers(shape, i))
                gate.read(x)
                del x
            real = placing.run

            def run(program: Any, *args: Any, real: Any = real) -> Any:
                started.set()
                return real(program, *args)

            monkeypatch.setattr(placing, "run", run)
            got = []

            def land(first: int, got: list[Any] = got) -> None:
                source = numbers(shape, first)
                for j in range(3):  # The second landing finds the first one's stages in use.
                    source[...] = numbers(shape, first + j)
                    with pool.step() as step:
                        x = step.put(source)
                        source[...] = -1
                        got.append(jax.jit(lambda x: x + 0)(x))
                        del x

            writer = threading.Thread(target=land, args=(100 * i,))
            writer.start()
            assert started.wait(60)
            gate.opened.set()
            writer.join(60)
            gate.thread.join(60)
            monkeypatch.undo()
            np.testing.assert_array_equal(gate.result, numbers(shape, i))
            for j, x in enumerate(got):
                np.testing.assert_array_equal(x, numbers(shape, 100 * i + j))
        pool.check()


@forms
@pytest.mark.parametrize("depth", [1, 2])
def test_every_block_of_a_large_leaf_waits_for_its_stage(
    form: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed = Ring.next, 0

    def next_stage(self: Ring) -> Any:
        nonlocal passed
        stage = real(self)
        passed += 1
        assert all(x.is_ready() for x in stage.carried)
        return stage

    monkeypatch.setattr(Ring, "next", next_stage)
    with RingPool(1 << 20, form=form, depth=depth) as pool:
        for i in range(2):
            value = numbers((4, 1 << 20), i)
            x = pool.put(value)
            value[...] = -1
            np.testing.assert_array_equal(x, numbers((4, 1 << 20), i))
            del x
    assert passed == 2 * 16


def test_a_ring_reuses_what_is_free_makes_what_is_missing_and_waits_for_no_more() -> None:
    class Fence:
        ready = True
        waits = 0
        broken = False

        def is_ready(self) -> bool:
            return self.ready

        def block_until_ready(self) -> None:
            self.waits += 1
            if self.broken:
                raise RuntimeError("the program failed")

    stages = Stages(DEVICES[0], 2)
    kind = StageKind((SizeClass((2,), FLOAT),), ())
    ring = stages.take(kind)

    def turn() -> Any:
        stage = ring.next()
        ring.back(stage)
        return stage

    first, fence = turn(), Fence()
    first.carried = (fence,)
    assert turn() is first
    assert fence.waits == 1
    fence.ready = False
    second = turn()
    assert second is not first
    second.carried = (Fence(),)
    assert fence.waits == 1
    assert turn() is first  # The ring is full: it waits for the one that was used longest ago.
    assert fence.waits == 2
    assert turn() is second
    fence.broken = True
    third = turn()
    assert third not in (first, second)
    assert [turn(), turn()] == [second, third]


def test_a_stage_that_is_being_filled_is_not_used_again() -> None:
    stages = Stages(DEVICES[0], 3)
    ring = stages.take(StageKind((SizeClass((2,), FLOAT),), ()))
    first, second = ring.next(), ring.next()
    assert first is not second
    ring.back(first)
    assert ring.next() is first


def test_rings_of_the_kinds_used_last_are_kept() -> None:
    stages = Stages(DEVICES[0], 1)
    kinds = [StageKind((SizeClass((n,), FLOAT),), ()) for n in range(Stages.MAX_KINDS + 1)]
    rings = [stages.take(kind) for kind in kinds]
    for i, one in enumerate(rings):
        stages.give(one, kinds[i])
    assert stages.take(kinds[0]) is not rings[0]
    assert stages.take(kinds[1]) is rings[1]
    assert stages.take(kinds[1]) is not rings[1]


def test_stages_lie_in_pinned_memory_that_xla_owns() -> None:
    stages = Stages(DEVICES[0], 1)
    for name in DTYPES:
        for shape in ((), (7,), (1 << 12,)):
            stage = stages.make(StageKind((SizeClass(shape, jnp.dtype(name)),), (TOKEN,)))
            (pinned,), (view,), (token,) = stage.inputs, stage.views, stage.carried
            assert pinned.sharding.memory_kind == "pinned_host"
            assert token.sharding.memory_kind == DEVICES[0].default_memory().kind
            value = random_bits(view.dtype, shape)
            view[...] = value
            assert np.asarray(pinned).tobytes() == value.tobytes()
            before = address(token)
            assert address(jax.jit(lambda x: x, donate_argnums=0)(token)) == before


def test_two_threads_land_at_once() -> None:
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []
    with RingPool(256) as pool:
        pool.reserve({"a": numbers((300,)), "b": numbers((20,))}, slots=2)

        def work(first: int) -> None:
            try:
                a, b = numbers((300,)), numbers((20,))
                barrier.wait(60)
                for i in range(first, first + 100):
                    a[...], b[...] = i, -i
                    got = pool.put({"a": a, "b": b})
                    a[...] = b[...] = 0.5
                    assert (np.asarray(got["a"]) == i).all()
                    assert (np.asarray(got["b"]) == -i).all()
                    del got
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        pool.check()
        stats = pool.stats()
        assert (stats.copy_count, stats.leased_count, stats.slot_count) == (0, 0, 4)


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
@forms
def test_whatever_strikes_in_the_middle_of_a_landing_loses_nothing(
    form: str, when: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"small": numbers((5,)), "large": numbers((80,))}
    with RingPool(form=form) as pool:
        for _ in range(2):
            with pool.step() as step:
                step.put(batch)
        at = 0
        while True:
            left, real = at, placing.run

            def run(program: Any, *args: Any, real: Any = real) -> Any:
                nonlocal left
                left -= 1
                if left == -1 and when == "before":
                    raise error("struck")
                result = real(program, *args)
                if left == -1:
                    raise error("struck")
                return result

            with monkeypatch.context() as patch:
                patch.setattr(placing, "run", run)
                patch.setattr(ring, "run", run)
                try:
                    with pool.step() as step:
                        step.put({k: v - 7 for k, v in batch.items()})
                except error:
                    pass
            pool.check()
            assert pool.stats().leased_count == 0
            with pool.step() as step:
                for name, x in step.put(batch).items():
                    np.testing.assert_array_equal(x, batch[name])
                del x
            if left >= 0:
                break
            at += 1
        assert at >= 5 + 2
        assert pool.stats().slot_count == 2


def test_an_interrupt_between_two_bytecodes_of_a_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Struck at every call that a landing makes of the cuts and the rings: what was in use is dropped."""
    batch = {"small": numbers((5,)), "large": numbers((80,))}
    names = [(Cut, "fill"), (Ring, "next"), (Stages, "take"), (Stages, "give"), (PinnedRing, "_record")]
    with RingPool() as pool:
        for _ in range(2):
            with pool.step() as step:
                step.put(batch)
        for owner, name in names:
            for at in range(3):
                left, real = at, getattr(owner, name)

                def struck(*args: Any, real: Any = real) -> Any:
                    nonlocal left
                    left -= 1
                    result = real(*args)
                    if left == -1:
                        raise KeyboardInterrupt
                    return result

                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, struck)
                    try:
                        with pool.step() as step:
                            step.put({k: v - 7 for k, v in batch.items()})
                    except KeyboardInterrupt:
                        pass
                pool.check()
                with pool.step() as step:
                    for key, x in step.put(batch).items():
                        np.testing.assert_array_equal(x, batch[key])
                    del x
        assert pool.stats().slot_count == 2


def test_a_lost_stage_is_made_anew_without_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with RingPool() as pool:
        pool.reserve(numbers((80,)), slots=1)
        x = pool.put(numbers((80,)))
        del x
        with pool.steady():
            pool.ring._stages._idle.clear()
            x = pool.put(numbers((80,)))
            del x


def test_a_value_that_cannot_be_read_costs_no_slot() -> None:
    with RingPool() as pool:
        x = pool.put(numbers((80,)))
        del x
        landing, (shelf,) = pool.ring, pool.arena.shelves.values()
        (slot,) = shelf.slots
        prepared = landing.prepare([shelf.size_class])
        with pytest.raises(TypeError):
            landing.land(prepared, [slot], [np.zeros(80, complex)], None)
        assert landing.is_whole(slot)
        np.testing.assert_array_equal(pool.put(numbers((80,), 1)), numbers((80,), 1))


# ----------------------------------------------------------------------------------------------------- forms and errors


def test_the_form_is_found_out_when_the_first_large_leaf_comes() -> None:
    with RingPool() as pool:
        landing = pool.ring
        assert isinstance(landing, PinnedRing)
        pool.put(numbers((4,)))
        assert landing.form is None
        pool.put(numbers((80,)))
        assert landing.form == "fused"


@pytest.mark.parametrize("how", ["refused", "wrong"])
def test_a_device_that_cannot_do_the_fused_form_gets_the_split_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update-slice that mixes kinds of memory, openxla/xla#47362."""
    real = Placer._fused

    def fused(self: Placer, cut: Cut) -> Any:
        if how == "refused":
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")
        mover = real(self, cut)
        return lambda stage, start, slots: mover(stage, (0,), slots)

    monkeypatch.setattr(Placer, "_fused", fused)
    with RingPool() as pool:
        for i in range(2):
            x = pool.put(numbers((9, 17), i))
            np.testing.assert_array_equal(x, numbers((9, 17), i))
            del x
        assert pool.ring.form == "split"


def test_the_split_form_brings_the_blocks_of_many_classes_by_one_program() -> None:
    with RingPool(form="split") as pool:
        for n in (32, 48, 160):
            pool.put(numbers((n,)))
        keys = [key[0] for key in programs_of(pool)]
        assert keys.count("bring") == 1
        assert keys.count("place") == 3


def test_a_device_without_pinned_host_memory_is_refused_by_name() -> None:
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

        def __str__(self) -> str:
            return "METAL:0"

    with pytest.raises(ValueError, match=r"pinned_host.*METAL:0 has device"):
        Stages(Device(), 2)


def test_no_pinned_host_memory_names_the_pool_its_cap_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(self: Stages, size_class: SizeClass, pinned: bool) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with RingPool() as pool:
        x = pool.put(numbers((80,)))
        del x
        pool.ring._stages._idle.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Stages, "fresh", fresh)
            with pytest.raises(MemoryError, match=r"68 bytes.*pinned_host.*64 GB.*HOST_MEMORY_LIMIT_GB") as error:
                pool.put(numbers((80,)))
        assert "RESOURCE_EXHAUSTED" in str(error.value.__cause__)
        np.testing.assert_array_equal(pool.put(numbers((80,))), numbers((80,)))


@pytest.mark.parametrize(
    ("options", "says"), [({"chunk_bytes": 8}, "chunk_bytes"), ({"depth": 0}, "depth"), ({"form": "both"}, "form")]
)
def test_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"{says} must be .*, got"):
        PinnedRing(DEVICES[0], False, CompileCounter(), **options)


# ------------------------------------------------------------------------------------------------------------- switches


@pytest.fixture(scope="module", params=["fused", "split"])
def warm(request: pytest.FixtureRequest) -> Iterator[RingPool]:
    with RingPool(form=request.param) as pool:
        lands(pool)
        yield pool
        pool.check()


def lands(pool: RingPool) -> None:
    for fill in (np.nan, 1.0, 2.0):
        for shape in ((5,), (9, 17)):
            with pool.step() as step:
                x = step.put(np.full(shape, fill, np.float32))
                assert not isinstance(x, jax.core.Tracer)
                with jax.transfer_guard("allow"):
                    np.testing.assert_array_equal(np.asarray(x), np.full(shape, fill))
                del x


@pytest.mark.parametrize("state", ["warm", "cold"])
@pytest.mark.parametrize(
    "switch",
    [
        jax.disable_jit,
        lambda: jax.debug_nans(True),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.transfer_guard("disallow_explicit"),
        lambda: jax.enable_x64(True),
        lambda: jax.default_device(DEVICES[3]),
        jax.checking_leaks,
    ],
    ids=["disable_jit", "debug_nans", "guard", "explicit guard", "x64", "default_device", "leaks"],
)
def test_blocks_land_under_a_switch(warm: RingPool, switch: Callable[[], Any], state: str) -> None:
    before = warm.stats()
    with RingPool(form=warm.ring.form) if state == "cold" else contextlib.nullcontext(warm) as pool, switch():
        lands(pool)
        assert pool.stats().copy_count == 0
    assert warm.stats().compile_count == before.compile_count


@pytest.mark.parametrize("form", [None, "fused", "split"])
def test_blocks_land_while_jit_traces(form: str | None) -> None:
    with RingPool(form=form) as pool:

        def traced(x: jax.Array) -> jax.Array:
            lands(pool)
            return x

        jax.jit(traced)(1.0)
        assert pool.ring.form == (form or "fused")
        lands(pool)
        assert pool.stats().copy_count == 0


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_strides_pass_in_blocks(shape: list[int], random: Any) -> None:
    base = numbers(tuple(3 * n for n in shape))
    view = base[tuple(slice(None, None, random.choice([1, 2, 3, -1, -2])) for _ in shape)]
    view = view.transpose(random.sample(range(view.ndim), view.ndim))
    with RingPool(16) as pool:
        np.testing.assert_array_equal(pool.put(view), view)
