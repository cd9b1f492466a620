"""The main test: random use of a pool against a tiny model, a dict of what is held and a few counters.

The same machine drives the fake device and the real one.
"""

import warnings
from typing import Any

import attrs
import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import arenax
from arenax.testing import PHASES, FakeDevice, fail

from .conftest import donate, pool_on, view

# Those that only the machine itself asks of the pool are left out.
FAILING = sorted({*PHASES} - {"snapshot", "check", "close", "begin_steady"})
ERRORS = (RuntimeError, MemoryError, KeyboardInterrupt)
CLASSES = arenax.SizeClasses.explicit([2, 4, 8])
DTYPES = ("float32", "int32", "uint8")
PAD = 3


@attrs.define(eq=False)
class Held:
    """Something drawn and what it must hold.

    Attributes:
        thing: The array or the lease; None when it is gone.
        expected: Its values, None where nobody knows.
        nbytes: Bytes of its slot.
        requested: Bytes asked for.
        pooled: Whether it counts as leased.
    """

    thing: Any
    expected: Any
    nbytes: int
    requested: int
    pooled: bool = True


@attrs.define(eq=False)
class OpenStep:
    step: arenax.Step
    strict: bool
    drawn: list[Held] = attrs.field(factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Draws, writes, returns and breaks, and compares with the model after each step."""

    held: Bundle[Held] = Bundle("held")
    leases: Bundle[Held] = Bundle("leases")
    steps: Bundle[OpenStep] = Bundle("steps")

    copies = 1  # How many devices hold all of a slot.
    arenas = 1  # In how many of them a reservation is made, each with the budget.

    def make_device(self) -> Any:
        raise NotImplementedError

    def where(self) -> dict[str, Any]:
        """Where the next draw is to lie."""
        return {}

    @initialize(
        mode=st.sampled_from(["grow", "spill", "raise"]),
        budget=st.sampled_from([None, 200, 600]),
        debug=st.sampled_from([False, False, True]),
    )
    def begin(self, mode: str, budget: int | None, debug: bool) -> None:
        warnings.simplefilter("ignore", RuntimeWarning)  # Spills are part of the game here.
        self.mode, self.budget = mode, budget
        self.pool = arenax.BufferPool(
            self.make_device(),
            ragged={"rag": arenax.Ragged(0, CLASSES, PAD), "fix": None},
            budget=budget,
            on_exhausted=mode,
            debug=debug,
        )
        self.measures: list[tuple[arenax.Measure, arenax.Stats]] = []
        self.alive: list[Held] = []
        self.tag = 0
        self.last = self.pool.stats()

    # What the model does around each draw: it learns from the spill counter alone which leaf is outside the pool.

    def values(self, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        self.tag = self.tag % 100 + 1
        return np.full(shape, self.tag, dtype)

    def spilled(self, before: arenax.Stats, classes: list[tuple[str, Held]]) -> None:
        """Marks the leaves that were spilled: a class spills its last leaves."""
        after = self.pool.stats()
        for size_class, stats in after.by_class.items():
            old = before.by_class.get(size_class)
            count = stats.spill_count - (old.spill_count if old else 0)
            for _, h in [c for c in classes if c[0] == str(size_class).partition(" over")[0]][::-1][:count]:
                h.pooled = False

    def drawn(self, before: arenax.Stats, arrays: list[Any], expected: list[Any], requested: list[int]) -> list[Held]:
        result = [
            Held(a, e, (e.nbytes if hasattr(e, "nbytes") else 0) * self.copies, r * self.copies)
            for a, e, r in zip(arrays, expected, requested, strict=True)
        ]
        names = [f"{e.dtype.name}[{','.join(map(str, e.shape))}]" for e in expected]
        self.spilled(before, list(zip(names, result, strict=True)))
        self.alive += result
        return result

    @rule(target=held, n=st.integers(0, 8), m=st.integers(1, 6), dtype=st.sampled_from(DTYPES), sizes=st.booleans())
    def put(self, n: int, m: int, dtype: str, sizes: bool) -> Any:
        batch = {"rag": self.values((n, 2), dtype), "fix": self.values((m,), dtype)}
        expected = [batch["fix"], self.padded(batch["rag"])]
        requested = [x.nbytes for x in (batch["fix"], batch["rag"])]
        before = self.pool.stats()
        try:
            got = self.pool.put(batch, with_sizes=sizes, **self.where())
        except arenax.PoolExhausted:
            assert self.mode == "raise"
            return multiple()
        arrays, scalars = got if sizes else (got, None)
        things = [arrays["fix"], arrays["rag"]]
        if scalars is not None:
            things.append(scalars["rag"])
            expected.append(np.int32(n))
            requested.append(4)
        return multiple(*self.drawn(before, things, expected, requested))

    def padded(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        full = np.full((CLASSES.class_of(len(x)), 2), PAD, x.dtype)
        full[: len(x)] = x
        return full

    @rule(h=consumes(held))
    def drop(self, h: Held) -> None:
        self.alive.remove(h)
        h.thing = None

    @rule(h=consumes(held))
    def donate_away(self, h: Held) -> None:
        donate(h.thing)
        self.alive.remove(h)
        h.thing = None

    @rule(h=held)
    def look_through_a_view(self, h: Held) -> None:
        if h.thing is not None:
            held = view(h.thing)
            del held

    @rule(target=leases, n=st.integers(1, 8), dtype=st.sampled_from(DTYPES), fill=st.sampled_from([0, 5, None]))
    def lease(self, n: int, dtype: str, fill: int | None) -> Any:
        before = self.pool.stats()
        try:
            lease = self.pool.lease((n,), dtype, fill=fill, **self.where())
        except arenax.PoolExhausted:
            assert self.mode == "raise"
            return multiple()
        expected = np.full((n,), fill or 0, dtype)
        (h,) = self.drawn(before, [lease], [expected], [expected.nbytes])
        if fill is None:
            h.expected = None
        return h

    @rule(h=leases, data=st.data())
    def write(self, h: Held, data: st.DataObject) -> None:
        if h.thing is None:
            return
        (n,) = h.thing.shape
        at = data.draw(st.integers(-1, n))
        count = data.draw(st.integers(0, n))
        value = self.values((count,), h.thing.dtype.name)
        try:
            h.thing.write(value, at=(at,))
        except arenax.OutOfBounds:
            assert at < 0 or at + count > n
            return
        assert at >= 0 and at + count <= n  # noqa: PT018
        if h.expected is not None:
            h.expected = h.expected.copy()
            h.expected[at : at + count] = value

    @rule(h=leases, how=st.sampled_from(["fill", "update", "bad update"]))
    def change(self, h: Held, how: str) -> None:
        if h.thing is None:
            return
        if how == "fill":
            h.expected = self.values(h.thing.shape, h.thing.dtype.name)
            h.thing.fill(h.expected.flat[0])
        elif how == "update":
            h.thing.update(_double)
            h.expected = None if h.expected is None else h.expected + h.expected
        else:
            try:
                h.thing.update(_shorten)
            except TypeError:
                return
            raise AssertionError("a function that returns another shape was accepted")

    @rule(h=consumes(leases), how=st.sampled_from(["release", "drop", "detach", "with"]))
    def end_lease(self, h: Held, how: str) -> None:
        self.alive.remove(h)
        if how == "detach":
            array = h.thing.detach()
            if h.expected is not None:
                np.testing.assert_array_equal(np.asarray(array), h.expected)
        elif how == "release":
            h.thing.release()
            try:
                h.thing.release()
            except arenax.LeaseReleased:
                pass
            else:
                raise AssertionError("a double release was accepted")
        elif how == "with":
            with h.thing:
                pass
        h.thing = None

    @rule(target=steps, strict=st.booleans())
    def open_step(self, strict: bool) -> OpenStep:
        return OpenStep(self.pool.step(strict).__enter__(), strict)

    @rule(s=steps, n=st.integers(0, 8), dtype=st.sampled_from(DTYPES), how=st.sampled_from(["put", "full", "arange"]))
    def draw_in_step(self, s: OpenStep, n: int, dtype: str, how: str) -> None:
        before = self.pool.stats()
        try:
            if how == "put":
                rag, fix = self.values((n, 2), dtype), self.values((), dtype)
                got = s.step.put({"rag": rag, "fix": fix}, **self.where())
                things, expected = [got["fix"], got["rag"]], [fix, self.padded(rag)]
                requested = [fix.nbytes, rag.nbytes]
            elif how == "full":
                value = self.values((n, 3), dtype)
                thing = s.step.full((n, 3), self.tag, dtype, **self.where())
                things, expected, requested = [thing], [value], [value.nbytes]
            else:
                value = np.arange(n, dtype=dtype)
                things, expected, requested = [s.step.arange(n, dtype=dtype, **self.where())], [value], [value.nbytes]
        except arenax.PoolExhausted:
            assert self.mode == "raise"
            return
        s.drawn += self.drawn(before, things, expected, requested)

    @rule(s=steps, data=st.data())
    def keep(self, s: OpenStep, data: st.DataObject) -> None:
        drawn = [h for h in s.drawn if h.thing is not None]
        if drawn:
            h = data.draw(st.sampled_from(drawn))
            s.drawn.remove(h)
            s.step.keep(h.thing)
            # Out of the pool, and still what it was; the slot of the step has a new buffer and stays with the step.
            np.testing.assert_array_equal(np.asarray(h.thing), h.expected)
            s.drawn.append(Held(None, None, h.nbytes, h.requested, h.pooled))
            self.alive.remove(h)
            if h.pooled:
                self.alive.append(s.drawn[-1])

    @rule(s=consumes(steps), how=st.sampled_from(["end", "drop", "raise"]))
    def end_step(self, s: OpenStep, how: str) -> None:
        stale = [h.thing for h in s.drawn if h.thing is not None]
        for h in s.drawn:
            if h in self.alive:
                self.alive.remove(h)
            h.thing = None
        if how == "end":
            s.step.__exit__(None, None, None)
        elif how == "raise":
            error = ValueError("in the body")
            s.step.__exit__(ValueError, error, None)
        assert how == "drop" or not s.strict or all(x.is_deleted() for x in stale)
        s.drawn = []
        del s.step

    @rule(which=st.integers(0, 3))
    def measure(self, which: int) -> None:
        """Opens a scope, or ends any of those that are open."""
        if which < len(self.measures):
            scope, before = self.measures.pop(which)
            scope.__exit__(None, None, None)
            now, got = self.pool.stats(), scope.stats
            for name in ("hit", "creation", "conversion", "spill", "copy", "write"):
                name = f"{name}_count"
                assert getattr(got, name) == getattr(now, name) - getattr(before, name)
            for name in ("leased_bytes", "reserved_bytes", "requested_bytes", "slot_count", "leased_count"):
                peak = getattr(got, f"peak_{name}")
                assert getattr(before, name) <= peak <= getattr(now, f"peak_{name}")
                assert getattr(got, name) == getattr(now, name) <= peak
        else:
            before = self.pool.stats()
            self.measures.append((self.pool.measure().__enter__(), before))

    @rule(n=st.integers(1, 8), dtype=st.sampled_from(DTYPES), slots=st.integers(1, 3))
    def reserve(self, n: int, dtype: str, slots: int) -> None:
        before = self.pool.stats()
        try:
            self.pool.reserve(
                {"rag": arenax.ArraySpec((n, 2), dtype), "fix": arenax.ArraySpec((n,), dtype)}, slots=slots
            )
        except MemoryError:
            assert self.budget is not None
            assert self.pool.stats().reserved_bytes == before.reserved_bytes
        else:
            made = self.arenas * slots * (len(CLASSES.boundaries) + 2)
            assert self.pool.stats().slot_count == before.slot_count + made

    @rule(bad=st.sampled_from([{"rag": np.ones((9, 2)), "fix": 1}, {"rag": np.ones((2, 2)), "fix": "x"}, [1]]))
    def refuse(self, bad: Any) -> None:
        before = self.pool.stats()
        try:
            self.pool.put(bad)
        except (ValueError, TypeError):
            assert self.pool.stats() == before
            return
        raise AssertionError("a bad batch was accepted")

    @rule(
        phase=st.sampled_from(FAILING),
        nth=st.integers(1, 2),
        when=st.sampled_from(["before", "after"]),
        error=st.sampled_from(ERRORS),
        how=st.sampled_from(["put", "step", "lease", "detach", "keep", "reserve", "donated"]),
        n=st.integers(1, 8),
        dtype=st.sampled_from(DTYPES),
    )
    def strike(self, phase: str, nth: int, when: str, error: type[BaseException], how: str, n: int, dtype: str) -> None:
        """An operation that fails at a phase, or not; nothing is left of it, whatever it came to."""
        try:
            with fail(self.pool, phase, nth, error, when):
                self.come_and_go(how, n, dtype)
        except arenax.PoolExhausted:
            assert self.mode == "raise" or how == "reserve"
        except error:
            pass

    def come_and_go(self, how: str, n: int, dtype: str) -> None:
        batch = {"rag": self.values((n, 2), dtype), "fix": self.values((n,), dtype)}
        if how == "put":
            got = self.pool.put(batch, with_sizes=True, **self.where())[0]
            assert (np.array(got["fix"]) == batch["fix"]).all()
        elif how == "donated":
            donate(self.pool.put(batch, **self.where())["fix"])
        elif how == "reserve":
            self.pool.reserve({"rag": arenax.ArraySpec((n, 2), dtype), "fix": arenax.ArraySpec((n,), dtype)}, slots=1)
        elif how in ("lease", "detach"):
            with self.pool.lease((n,), dtype, fill=2, **self.where()) as lease:
                lease.append(batch["fix"])
                lease.update(_double)
                assert (np.array(lease.array) == batch["fix"] + batch["fix"]).all()
                if how == "detach":
                    lease.detach()
        else:
            with self.pool.step() as step:
                got = step.put(batch, **self.where())
                assert (np.array(got["fix"]) == batch["fix"]).all()
                assert (np.array(step.zeros((n,), dtype, **self.where())) == 0).all()
                if how == "keep":
                    step.keep(got)

    @invariant()
    def everything_held_is_what_it_was(self) -> None:
        for h in getattr(self, "alive", ()):
            if h.thing is not None and h.expected is not None:
                array = h.thing.array if isinstance(h.thing, arenax.Lease) else h.thing
                got = np.array(array)  # A copy: a view would keep the slot from being donated.
                assert (got.shape, got.dtype) == (h.expected.shape, h.expected.dtype)
                assert (got == h.expected).all(), f"{got} for {h.expected}"

    @invariant()
    def the_figures_are_the_models(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        stats = self.pool.stats()
        pooled = [h for h in self.alive if h.pooled]
        assert stats.leased_count == len(pooled)
        assert stats.leased_bytes == sum(h.nbytes for h in pooled)
        assert stats.requested_bytes == sum(h.requested for h in pooled)
        assert stats.reserved_bytes == stats.leased_bytes + stats.idle_bytes
        if self.budget is not None:
            assert stats.reserved_bytes <= self.budget * self.arenas
        if self.mode != "grow":
            assert stats.conversion_count == 0
        for name in ("hit", "creation", "conversion", "spill", "copy", "write", "wait"):
            assert getattr(stats, f"{name}_count") >= getattr(self.last, f"{name}_count")
        self.last = stats

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.alive.clear()
            self.pool.close()
            assert self.pool.stats().leased_count == 0


def _double(slot: Any) -> Any:
    return slot + slot


def _shorten(slot: Any) -> Any:
    return slot[:0].reshape(0, 1)


class FakeMachine(PoolMachine):
    def make_device(self) -> Any:
        return FakeDevice()


class CpuMachine(PoolMachine):
    kind = "cpu"
    landing: Any = None

    def make_device(self) -> Any:
        # One landing for all examples, so that they share its compiled programs.
        if self.landing is None:
            type(self).landing = pool_on(self.kind).landing
        return self.landing


class ReplicatedMachine(CpuMachine):
    kind = "replicated"
    landing: Any = None
    copies = 2


class SequenceMachine(PoolMachine):
    """Two devices, and each draw on one of them."""

    landings: Any = None
    arenas = 2

    def make_device(self) -> Any:
        if self.landings is None:
            type(self).landings = [home.landing for home in pool_on("sequence").homes]
        return self.landings

    def where(self) -> dict[str, Any]:
        return {"device": self.landings[self.tag % 2].device}


class RingMachine(CpuMachine):
    kind = "ring"
    landing: Any = None


_stress = hypothesis.settings().max_examples > 1000
TestFake = FakeMachine.TestCase
TestFake.settings = hypothesis.settings(max_examples=5000 if _stress else 120, stateful_step_count=40)
TestCpu = CpuMachine.TestCase
TestCpu.settings = hypothesis.settings(max_examples=2000 if _stress else 40, stateful_step_count=30)
TestRing = RingMachine.TestCase
TestRing.settings = TestCpu.settings
TestReplicated = ReplicatedMachine.TestCase
TestReplicated.settings = hypothesis.settings(max_examples=1000 if _stress else 20, stateful_step_count=30)
TestSequence = SequenceMachine.TestCase
TestSequence.settings = TestReplicated.settings
