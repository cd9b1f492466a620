"""The pool's errors: fields, messages, built-in bases, pickles and copies."""

import copy
import pickle
import re
import traceback
from typing import Any

import numpy as np
import pytest

import arenax
from arenax import _errors
from arenax.testing import FakeDevice

SHORTAGE = {
    "pool": "p",
    "asked": "float32[4]",
    "leased_count": 2,
    "slot_count": 3,
    "idle_bytes": 16,
    "budget_bytes": None,
    "holders": {"Lease": 1},
    "oldest": ("Lease of float32[4] for 0.5 s",),
    "oldest_seconds": 0.5,
}
CASES: list[tuple[type[arenax.ArenaxError], dict[str, Any], tuple[type[Exception], ...]]] = [
    (arenax.PoolExhausted, SHORTAGE, (RuntimeError,)),
    (_errors.WaitTimeout, {**SHORTAGE, "timeout_seconds": 1.5}, (arenax.PoolExhausted, TimeoutError, RuntimeError)),
    (
        _errors.BudgetExceeded,
        {**SHORTAGE, "asked_bytes": 64, "reserved_bytes": 48},
        (arenax.PoolExhausted, MemoryError, RuntimeError),
    ),
    (
        arenax.LeaseReleased,
        {"size_class": "float32[4]", "released_seconds": 0.5, "call_site": None},
        (RuntimeError,),
    ),
    (arenax.NoSizeClass, {"size": 9, "maximum": 8, "axis": 1, "leaf": "['x']"}, (ValueError,)),
    (arenax.OutOfBounds, {"at": (3,), "shape": (2,), "slot_shape": (4,)}, (ValueError,)),
    (arenax.NotSteady, {"cause": "copy", "call_site": "train.py:12"}, (RuntimeError,)),
    (arenax.PoolClosed, {"pool": "p"}, (RuntimeError,)),
    (arenax.BadTrace, {"path": "a.csv", "where": "line 7", "fault": "frees what is not alive"}, (ValueError,)),
]
kinds = pytest.mark.parametrize(("kind", "fields", "bases"), CASES, ids=lambda x: getattr(x, "__name__", None))


def test_the_cases_above_are_all_errors_there_are() -> None:
    defined = {x for x in vars(_errors).values() if isinstance(x, type) and issubclass(x, arenax.ArenaxError)}
    assert defined - {arenax.ArenaxError} == {kind for kind, _, _ in CASES}


@kinds
def test_it_derives_from_the_promised_built_ins(
    kind: type[arenax.ArenaxError], fields: dict[str, Any], bases: tuple[type[Exception], ...]
) -> None:
    for base in (arenax.ArenaxError, Exception, *bases):
        assert issubclass(kind, base)


@kinds
def test_it_documents_and_carries_its_fields(
    kind: type[arenax.ArenaxError], fields: dict[str, Any], bases: tuple[type[Exception], ...]
) -> None:
    annotated = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    documented = "\n".join(base.__doc__ or "" for base in kind.__mro__ if issubclass(base, arenax.ArenaxError))
    in_docs = set(re.findall(r"^ +(\w+): ", documented, re.MULTILINE))
    assert annotated == in_docs == set(fields)
    error = kind("what happened", **fields)
    assert {name: getattr(error, name) for name in fields} == fields
    assert str(error) == "what happened"
    assert traceback.format_exception_only(error)[-1].strip().endswith(f"{kind.__name__}: what happened")


@kinds
@pytest.mark.parametrize(
    "trip",
    [*range(pickle.HIGHEST_PROTOCOL + 1), copy.copy, copy.deepcopy],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_it_survives_a_pickle_and_a_copy(
    trip: Any, kind: type[arenax.ArenaxError], fields: dict[str, Any], bases: tuple[type[Exception], ...]
) -> None:
    error = kind("what happened", **fields)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error, trip)) if isinstance(trip, int) else trip(error)
    assert again is not error
    assert type(again) is kind
    assert str(again) == "what happened"
    assert again.args == ("what happened",)
    assert {name: getattr(again, name) for name in fields} == fields
    assert again.__notes__ == ["a note"]


def raised_in_earnest() -> list[arenax.ArenaxError]:
    """One error of each kind, as the pool itself raises it."""
    errors: list[arenax.ArenaxError] = []

    def catch(call: Any) -> None:
        with pytest.raises(arenax.ArenaxError) as caught:
            call()
        errors.append(caught.value)

    x = np.ones(4, np.float32)
    ragged = arenax.Ragged(0, arenax.SizeClasses.explicit([4]))
    with arenax.BufferPool(FakeDevice(), name="p", budget=32, ragged=ragged) as pool:
        lease = pool.lease((4,))
        catch(lambda: lease.write(x, at=(1,)))
        lease.release()
        catch(lease.release)
        catch(lambda: pool.reserve(x, slots=3))
        catch(lambda: pool.put(np.ones(5, np.float32)))
        with pytest.raises(arenax.NotSteady), pool.steady():
            catch(lambda: pool.put(np.ones(4, np.int8)))
            pool.put(np.ones(4, np.int8))
    catch(lambda: pool.put(x))
    with arenax.BufferPool(FakeDevice(), name="p", on_exhausted="raise") as pool:
        catch(lambda: pool.put(x))
    with arenax.BufferPool(FakeDevice(), name="p", on_exhausted="wait", timeout=0) as pool:
        pool.reserve(arenax.ArraySpec((4,), "float32"), slots=1)
        held = pool.put(x)
        catch(lambda: pool.put(x))
        del held
    catch(lambda: arenax.Trace.from_events([("free", 1, 0)]))
    return errors


def test_what_the_pool_raises_carries_every_field_and_pickles() -> None:
    errors = raised_in_earnest()
    assert {type(e) for e in errors} == {kind for kind, _, _ in CASES}
    fields = {kind: set(names) for kind, names, _ in CASES}
    for error in errors:
        assert set(vars(error)) == fields[type(error)], type(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_the_messages_say_what_was_asked_what_there_is_and_what_to_do() -> None:
    said = {type(e): str(e) for e in raised_in_earnest()}
    for kind, *words in [
        (
            arenax.PoolExhausted,
            "'p'",
            "float32[4]",
            "0 of 0 slots leased",
            "call pool.reserve(example, slots=...) first",
        ),
        (
            _errors.WaitTimeout,
            "'p'",
            "float32[4]",
            "1 of 1 slots leased",
            "after a wait of 0 s",
            "release leases sooner",
        ),
        (_errors.BudgetExceeded, "'p'", "60 bytes", "budget of 32 bytes", "raise the budget"),
        (arenax.LeaseReleased, "float32[4]", "check out a new one"),
        (arenax.NoSizeClass, "size 5", "4", "declare a larger maximum"),
        (arenax.OutOfBounds, "(4,)", "(1,)", "float32[4]"),
        (arenax.NotSteady, "'p'", "creation", "test_errors.py"),
        (arenax.PoolClosed, "'p'", "closed"),
    ]:
        for word in words:
            assert word in said[kind], (kind, word, said[kind])
