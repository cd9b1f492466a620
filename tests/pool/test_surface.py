"""The export surface: which names there are, that each is documented, and the signatures that design.md promises."""

import inspect
import types
from typing import Any

import pytest

import arenax
import arenax.testing

PUBLIC = {
    "ArenaxError",
    "ArraySpec",
    "BadTrace",
    "BufferPool",
    "CancelToken",
    "Compile",
    "Lease",
    "LeaseReleased",
    "Measure",
    "NoSizeClass",
    "NotSteady",
    "Plan",
    "OutOfBounds",
    "PoolClosed",
    "PoolExhausted",
    "Ragged",
    "SizeClass",
    "SizeClasses",
    "Stats",
    "Step",
    "Trace",
    "trace_leases",
    "valid_mask",
}
TESTING = {"Export", "FakeArray", "FakeDevice", "Fault", "Interrupt", "PHASES", "fail", "interrupt"}
SIGNATURES = {
    "BufferPool": (
        "placement=None, ragged=None, budget=None, on_exhausted='grow', timeout=None, name=None, landing=None, "
        "debug=None"
    ),
    "BufferPool.reserve": "self, example, slots=3, *, device=None",
    "BufferPool.put": (
        "self, batch, with_sizes=False, *, device=None, local=False, extent=None, cancel=None, planner=None"
    ),
    "BufferPool.warm_up": "self, fn, spec, with_sizes=False",
    "BufferPool.planner_for": "self, ragged",
    "BufferPool.step": "self, strict=False, max_compiles=None",
    "BufferPool.lease": "self, shape, dtype='float32', *, fill=0, device=None",
    "BufferPool.steady": "self",
    "BufferPool.stats": "self",
    "BufferPool.measure": "self",
    "BufferPool.record": "self, path=None",
    "BufferPool.from_plan": "plan, **arguments",
    "BufferPool.trim": "self, to_bytes=0",
    "Plan.fit": "trace, max_classes=16, budget=None",
    "Trace.from_events": "events, name='trace'",
    "BufferPool.check": "self",
    "BufferPool.close": "self",
    "SizeClasses.explicit": "boundaries",
    "SizeClasses.pow2": "lo, hi",
    "SizeClasses.geometric": "lo, hi, per_doubling=4",
    "SizeClasses.multiples": "of, hi",
    "SizeClasses.fit": ("lengths, k=8, multiple_of=1, cost='linear', slots=None, memory_weight=0, min_gain=0"),
    "SizeClasses.fit_curve": "lengths, k=16, multiple_of=1, cost='linear', slots=None, memory_weight=0",
    "SizeClasses.padding_overhead": "self, lengths",
    "SizeClasses.class_of": "self, n",
    "Ragged": "axis, size_classes, pad_value=0",
    "ArraySpec": "shape, dtype",
    "Step.put": "self, batch, with_sizes=False, *, device=None, local=False, extent=None",
    "Step.zeros": "self, shape, dtype=None, *, device=None",
    "Step.ones": "self, shape, dtype=None, *, device=None",
    "Step.full": "self, shape, fill_value, dtype=None, *, device=None",
    "Step.empty": "self, shape, dtype=None, *, device=None",
    "Step.arange": "self, start, stop=None, step=None, dtype=None, *, device=None",
    "Step.eye": "self, N, M=None, k=0, dtype=None, *, device=None",
    "Step.array": "self, object, dtype=None, *, device=None",
    "Step.keep": "self, tree",
    "Lease.write": "self, value, at=None",
    "Lease.append": "self, rows",
    "Lease.update": "self, fn, *args",
    "Lease.fill": "self, value",
    "Lease.release": "self",
    "Lease.detach": "self",
    "valid_mask": "size, capacity",
    "trace_leases": "",
}
PROPERTIES = {
    "Lease": {"array", "shape", "dtype", "size_class", "device", "released", "cursor"},
    "Stats": {"internal_waste", "skew", "stranding", "realized_fragmentation"},
    "SizeClasses": {"maximum"},
    "Measure": {"stats"},
}


def names_of(module: types.ModuleType) -> set[str]:
    return {n for n, x in vars(module).items() if not n.startswith("_") and not isinstance(x, types.ModuleType)}


def plain(function: Any) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))[1:-1]


def find(name: str) -> Any:
    head, _, tail = name.partition(".")
    return getattr(getattr(arenax, head), tail) if tail else getattr(arenax, head)


def members() -> list[tuple[str, Any]]:
    """Every public name of arenax and of `arenax.testing`, and every public member that a class of theirs defines."""
    found: list[tuple[str, Any]] = []
    for module, names in ((arenax, PUBLIC), (arenax.testing, TESTING)):
        for name in sorted(names):
            thing = getattr(module, name)
            found.append((name, thing))
            for member, value in vars(thing).items() if isinstance(thing, type) else ():
                if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                    found.append((f"{name}.{member}", getattr(thing, member)))
    return found


def test_arenax_exports_these_names_and_no_others() -> None:
    assert names_of(arenax) == PUBLIC
    assert arenax.__version__.count(".") == 2
    for name in PUBLIC:
        assert getattr(arenax, name).__module__.startswith("arenax._")


def test_arenax_testing_defines_these_names_and_no_others() -> None:
    homes = ("arenax.testing", "arenax._faults", "arenax._interrupts")
    names = names_of(arenax.testing)
    own = {n for n in names if getattr(getattr(arenax.testing, n), "__module__", homes[0]) in homes}
    assert own == TESTING


@pytest.mark.parametrize(("name", "thing"), members(), ids=[name for name, _ in members()])
def test_every_public_name_and_method_is_documented(name: str, thing: Any) -> None:
    text = inspect.getdoc(thing)
    assert text, name
    first = text.splitlines()[0]
    assert first == first.strip()
    assert text.rstrip()[-1] in ".:)]}`'\"" or ">>>" in text
    assert not first.startswith("Method generated by attrs")


@pytest.mark.parametrize(("name", "signature"), SIGNATURES.items(), ids=list(SIGNATURES))
def test_signatures_are_those_of_the_design(name: str, signature: str) -> None:
    assert plain(find(name)) == signature


@pytest.mark.parametrize(("name", "properties"), PROPERTIES.items(), ids=list(PROPERTIES))
def test_properties_are_those_of_the_design(name: str, properties: set[str]) -> None:
    kind = find(name)
    assert {n for n, x in vars(kind).items() if isinstance(x, property) and not n.startswith("_")} == properties
    for name in properties:
        with pytest.raises(AttributeError):
            setattr(object.__new__(kind), name, None)


def test_contexts_are_contexts() -> None:
    for kind in (arenax.BufferPool, arenax.Step, arenax.Lease):
        assert callable(kind.__enter__)
        assert callable(kind.__exit__)
    assert hasattr(arenax.BufferPool(arenax.testing.FakeDevice()).steady(), "__enter__")
