"""The figures of a pool: derived ones, the table, and the keys of `Device.memory_stats`."""

import re

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax import SizeClass, Stats
from arenax._stats import COUNTERS, GAUGES, human_bytes
from arenax.testing import FakeDevice

SMALL, LARGE = SizeClass((4,), np.dtype(np.float32)), SizeClass((8, 2), np.dtype(np.int8))
DESIGN_GAUGES = ["reserved_bytes", "leased_bytes", "requested_bytes", "idle_bytes", "slot_count", "leased_count"]
DESIGN_COUNTERS = [
    "hit_count",
    "creation_count",
    "conversion_count",
    "converted_bytes",
    "spill_count",
    "copy_count",
    "write_count",
    "written_bytes",
    "compile_count",
    "wait_count",
]


def test_it_has_every_field_of_the_design_in_whole_and_part() -> None:
    names = {f.name for f in attrs.fields(Stats)}
    assert set(DESIGN_GAUGES) == set(GAUGES)
    assert {*COUNTERS, "compile_count"} == set(DESIGN_COUNTERS)
    assert names == {
        *DESIGN_GAUGES,
        *DESIGN_COUNTERS,
        *(f"peak_{g}" for g in DESIGN_GAUGES),
        "budget_bytes",
        "landing",
        "by_class",
        "by_device",
    }
    assert set(re.findall(r"^ +(\w+): ", Stats.__doc__ or "", re.MULTILINE)) == names


def test_waste_is_the_share_of_the_leased_bytes_that_nobody_asked_for() -> None:
    assert Stats().internal_waste == 0
    assert Stats(leased_bytes=200, requested_bytes=50).internal_waste == 0.75
    assert Stats(leased_bytes=200, requested_bytes=200).internal_waste == 0


def test_stranding_is_the_sum_of_the_peaks_over_the_peak_of_the_sum() -> None:
    assert Stats().stranding == 1
    parts = {SMALL: Stats(peak_leased_bytes=30), LARGE: Stats(peak_leased_bytes=20)}
    assert Stats(peak_leased_bytes=25, by_class=parts).stranding == 2
    assert Stats(peak_leased_bytes=50, by_class=parts).stranding == 1


def test_fragmentation_is_what_was_reserved_beyond_what_was_requested() -> None:
    assert Stats(peak_reserved_bytes=10).realized_fragmentation == 0
    assert Stats(peak_reserved_bytes=150, peak_requested_bytes=100).realized_fragmentation == 0.5


def test_derived_figures_of_a_real_history() -> None:
    with arenax.BufferPool(FakeDevice(), ragged=arenax.Ragged(0, arenax.SizeClasses.explicit([4, 16]))) as pool:
        x = pool.put(np.ones(3, np.float32))  # 16 bytes, 12 of them asked for.
        del x
        y = pool.put(np.ones(16, np.float32))  # 64 bytes.
        stats = pool.stats()
        assert stats.internal_waste == 0
        assert stats.stranding == (16 + 64) / 64
        assert stats.realized_fragmentation == (80 - 64) / 64
        del y
        z = pool.put(np.ones(2, np.float32))
        assert pool.stats().internal_waste == 0.5
        del z


def test_memory_stats_has_jaxs_keys() -> None:
    with arenax.BufferPool(FakeDevice(), budget=1000) as pool:
        pool.reserve(arenax.ArraySpec((4,), "float32"), slots=3)
        pool.reserve(arenax.ArraySpec((100,), "uint8"), slots=1)
        held = [pool.put(np.ones(4, np.float32)), pool.put(np.ones(100, np.uint8))]
        del held[0]
        assert pool.stats().memory_stats() == {
            "bytes_in_use": 100,
            "peak_bytes_in_use": 116,
            "bytes_reserved": 148,
            "peak_bytes_reserved": 148,
            "pool_bytes": 148,
            "peak_pool_bytes": 148,
            "num_allocs": 2 + 4,
            "largest_alloc_size": 100,
            "largest_free_block_bytes": 16,
            "bytes_limit": 1000,
            "bytes_reservable_limit": 1000,
        }
    empty = Stats().memory_stats()
    assert set(empty.values()) == {0}


def test_the_table_names_each_class_and_its_figures() -> None:
    with arenax.BufferPool(FakeDevice(), budget="3KiB") as pool:
        pool.reserve(arenax.ArraySpec((256,), "float32"), slots=2)
        held = pool.put({"a": np.ones(256, np.float32), "b": np.ones((8, 2), np.int8)})
        header, *rows = str(pool.stats()).splitlines()
        cells = {row.split()[0]: row.split()[1:] for row in rows[:3]}
        assert header.split()[:4] == ["size", "class", "slots", "leased"]
        #                         slots leased peak  reserved  requested  hits created spilled
        assert cells["float32[256]"] == ["2", "1", "1", "2.0", "KiB", "1.0", "KiB", "1", "2", "0"]
        assert cells["int8[8,2]"] == ["1", "1", "1", "16", "B", "16", "B", "0", "1", "0"]
        assert cells["all"] == ["3", "2", "2", "2.0", "KiB", "1.0", "KiB", "1", "3", "0"]
        assert len({len(row) for row in [header, *rows[:3]]}) == 1
        assert "1 hits, 3 creations, 0 conversions" in rows[3]
        assert rows[4] == "budget 3.0 KiB; padding 0.0% of what is leased; landing: fake"
        del held
    assert "no budget" in str(Stats())


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_human_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text


def test_a_snapshot_is_frozen_and_does_not_follow_the_pool() -> None:
    with arenax.BufferPool(FakeDevice()) as pool:
        before = pool.stats()
        held = pool.put(np.ones(4, np.float32))
        assert (before.leased_count, before.by_class) == (0, {})
        after = pool.stats()
        assert after.leased_count == 1
        for name in ("leased_count", "by_class"):
            with pytest.raises(AttributeError):
                setattr(after, name, 0)
        del held
        assert after.by_class[SMALL].leased_count == 1


def test_the_parts_sum_up_to_the_whole() -> None:
    with arenax.BufferPool(FakeDevice("fake:7")) as pool:
        held = pool.put([np.ones(4, np.float32), np.ones((8, 2), np.int8), np.ones(4, np.float32)])
        with pool.step() as step:
            step.zeros((4,))
            stats = pool.stats()
        for name in ("slot_count", "leased_bytes", "requested_bytes", "creation_count", "write_count", "written_bytes"):
            assert getattr(stats, name) == sum(getattr(part, name) for part in stats.by_class.values()) > 0
        assert set(stats.by_device) == {"fake:7"}
        assert stats.by_device["fake:7"].by_class == stats.by_class
        del held


@given(st.lists(st.tuples(st.sampled_from(["put", "step", "lease", "drop"]), st.integers(1, 16)), max_size=40))
def test_the_peaks_are_the_highest_that_were_seen(events: list[tuple[str, int]]) -> None:
    ragged = arenax.Ragged(0, arenax.SizeClasses.explicit([4, 16]))
    with arenax.BufferPool(FakeDevice(), ragged=ragged) as pool:
        held, seen = [], [pool.stats()]
        for event, size in events:
            value = np.ones(size, np.int8)
            if event == "put":
                held.append(pool.put(value))
            elif event == "lease":
                held.append(pool.lease((size,), "int8"))
            elif event == "step":
                with pool.step() as step:
                    step.put(value)
                    seen.append(pool.stats())
            elif held:
                held.pop(size % len(held))
            seen.append(pool.stats())
        for whole in (lambda s: s, *(lambda s, c=c: s.by_class.get(c, arenax.Stats()) for c in seen[-1].by_class)):
            for gauge in GAUGES:
                assert getattr(whole(seen[-1]), f"peak_{gauge}") == max(getattr(whole(s), gauge) for s in seen)
        held.clear()
