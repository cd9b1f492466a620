"""The budget: None, bytes, a text, or a fraction of what the device reports."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax._budget import budget_bytes
from arenax.testing import FakeDevice

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(("unit", "factor"), UNITS.items())
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_every_unit_in_any_case(unit: str, factor: int, spelling: type[str]) -> None:
    assert budget_bytes(f"3{spelling(unit)}", None, "cpu:0") == 3 * factor
    assert budget_bytes(f"  2.5 {spelling(unit)} ", None, "cpu:0") == int(2.5 * factor)


@given(st.integers(1, 2**50))
def test_bytes_are_themselves_as_int_and_as_text(n: int) -> None:
    assert budget_bytes(n, None, "cpu:0") == n
    assert budget_bytes(f"{n} B", None, "cpu:0") == n


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 2**46))
def test_a_fraction_never_exceeds_its_part_of_the_limit(fraction: float, limit: int) -> None:
    part = int(fraction * limit)
    if part:
        assert budget_bytes(fraction, limit, "gpu:0") == part <= limit
    else:
        with pytest.raises(ValueError, match="at least one byte"):
            budget_bytes(fraction, limit, "gpu:0")


def test_none_is_no_budget_and_one_is_all() -> None:
    assert budget_bytes(None, 100, "gpu:0") is None
    assert budget_bytes(1.0, 100, "gpu:0") == 100
    assert budget_bytes(1, 100, "gpu:0") == 1
    assert budget_bytes(np.float64(0.5), 100, "gpu:0") == 50


@pytest.mark.parametrize("bad", [True, False, [1], b"2GiB", 1j, object], ids=repr)
def test_another_kind_is_a_type_error(bad: object) -> None:
    with pytest.raises(TypeError, match="budget must be None, bytes"):
        budget_bytes(bad, 100, "gpu:0")


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "2",
        "GiB",
        "2 XiB",
        "-2GiB",
        "0.5B",
        "0 GiB",
        "2GiB!",
        "1e3B",
    ],
)
def test_a_value_out_of_range_is_a_value_error(bad: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        budget_bytes(bad, 100, "gpu:0")


def test_a_fraction_needs_a_device_that_says_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"0.5 .*bytes_limit.*cpu:0 does not report one.*2GiB"):
        budget_bytes(0.5, None, "cpu:0")


def test_the_pool_takes_each_form() -> None:
    for budget, nbytes in ((None, None), (4096, 4096), ("4KiB", 4096), (0.25, 4096)):
        with arenax.BufferPool(FakeDevice(bytes_limit=1 << 14), budget=budget) as pool:
            assert pool.stats().budget_bytes == nbytes
            pool.reserve(arenax.ArraySpec((1024,), "float32"), slots=1)
            if nbytes is not None:
                with pytest.raises(arenax.PoolExhausted):
                    pool.reserve(arenax.ArraySpec((1,), "bool"), slots=1)
