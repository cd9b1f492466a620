"""The soak on several devices: clean where the pool is right, on a sequence and on a mesh, and its detectors go off."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import arenax
from arenax._host_write import HostWrite, memory_of
from arenax_stress import _soak_places, _stress_command
from arenax_stress._soak import soak
from arenax_stress._soak_places import address_of, make_places, parts_of, values_of
from arenax_stress._soak_steps import endure
from arenax_stress.cli import main

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("faults", [False, True])
def test_a_short_soak_is_clean(seed: int, faults: bool) -> None:
    report = soak(
        seconds=90, operations=60, seed=seed, classes=3, modes=["grow", "raise"], devices=2, faults=faults, threads=2
    )
    assert report.failures == []
    assert [*report.stats] == [["grow, sequence", "raise, mesh"], ["grow, mesh", "raise, sequence"]][seed]
    assert all(len(stats.by_device) == 2 for stats in report.stats.values())
    assert report.verified_count > 30
    assert report.struck_count.total() > 0 or not faults
    assert report.replay.endswith("--faults --devices 2" if faults else "--devices 2")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_value_on_one_device_is_found(monkeypatch: Patch, seed: int) -> None:
    right, (_, last) = HostWrite._copy, jax.local_devices()[:2]

    def broken(self: Any, slot: Any, value: Any, rag: Any, *part: Any) -> None:
        right(self, slot, value, rag, *part)
        if slot.size_class.nbytes and self.device == last:
            memory_of(slot).reshape(-1).view(np.uint8)[-1:] ^= 1

    monkeypatch.setattr(HostWrite, "_copy", broken)
    report = soak(seconds=90, operations=100, seed=seed, classes=3, threads=1, modes=["grow"], devices=2)
    assert "elements of" in str(report.failures)
    assert report.failures[0].mode == ("grow, sequence", "grow, mesh")[seed]


def test_memory_that_two_hold_is_found_in_any_part(monkeypatch: Patch) -> None:
    """Of all parts, the last one alone is mistaken for that of another array."""
    right = _soak_places.address_of

    def broken(array: Any) -> tuple[int, ...]:
        found = right(array)
        return (*found[:-1], 64) if len(found) > 1 else found

    monkeypatch.setattr("arenax_stress._soak_ledger.address_of", broken)
    report = soak(seconds=90, operations=100, seed=1, classes=3, threads=1, modes=["grow"], devices=2)
    assert "hold the same memory, at 0x40" in str(report.failures)


def test_a_mesh_is_cut_as_far_as_every_boundary_can_be() -> None:
    for count, cut in ((1, 1), (2, 2), (3, 1), (8, 4)):
        sequence, mesh = make_places(count)
        assert [*sequence.devices] == jax.local_devices()[:count]
        assert mesh.shardings is not None
        assert mesh.shardings["rows"].mesh.shape == {"cut": cut, "copies": count // cut}
    assert [(place.name, place.placement) for place in make_places(None)] == [("", None)]


def test_parts_are_told_with_their_places() -> None:
    mesh = jax.make_mesh((2, 2), ("cut", "copies"), devices=jax.devices()[:4])
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    with arenax.BufferPool(NamedSharding(mesh, PartitionSpec("cut"))) as pool:
        array = pool.put(value)
    assert [(part == value[where]).all() for where, part in parts_of(array)] == [True] * 4
    assert len(set(address_of(array))) == 4
    np.testing.assert_array_equal(values_of(array), value)
    (scalar,) = parts_of(jax.device_put(np.float32(3)))
    assert value.sum()[scalar[0]].shape == scalar[1].shape == ()


@pytest.mark.parametrize("devices", [3, 8])
def test_a_long_run_on_a_mesh_does_not_grow(devices: int) -> None:
    report = endure(600, seed=3, devices=devices)
    assert (report.exit_status, report.failures) == (0, [])
    assert report.stats is not None
    assert len(report.stats.by_device) == devices
    assert report.stats.copy_count == 0
    assert report.stats.creation_count == report.stats.slot_count


def test_too_many_devices_are_refused_before_anything_happens(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="99 devices were asked for, and this process has 8"):
        soak(devices=99)
    monkeypatch.setattr(_stress_command, "soak", None)
    assert main(["stress", "--devices", "99"]) == 2
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=99" in capsys.readouterr().err


def test_the_command_takes_devices(monkeypatch: Patch) -> None:
    asked: list[dict[str, Any]] = []

    def fake(**options: Any) -> Any:
        asked.append(options)
        return soak(seconds=30, operations=1, threads=1, classes=2, modes=["grow"])

    monkeypatch.setattr(_stress_command, "soak", fake)
    assert main(["stress", "--devices", "8"]) == 0
    assert asked[0]["devices"] == 8
