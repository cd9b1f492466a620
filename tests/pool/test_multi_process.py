"""One pool over several processes, for real: `examples/multi_host.py` with processes of two CPU devices each."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import arenax
from arenax._mesh import global_shape, local_index

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_host.py"
SECONDS = 200


@functools.cache
def run(processes: int, *more: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, str(EXAMPLE), "--processes", str(processes), "--devices", "2", "--json", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("processes", [2, 4])
def test_training_is_bit_for_bit_that_without_the_pool_and_close_to_one_process(processes: int) -> None:
    found, alone = run(processes), run(1)
    assert found["same"]
    assert found["pooled"] == found["plain"]
    assert found["pooled"]["compiles"] == 3  # One a size class, whatever length each process has.
    np.testing.assert_allclose(found["pooled"]["losses"], alone["pooled"]["losses"], rtol=0, atol=1e-5)
    for name, values in found["pooled"]["parameters"].items():
        np.testing.assert_allclose(values, alone["pooled"]["parameters"][name], rtol=0, atol=1e-5)


@pytest.mark.timeout(2 * SECONDS)
def test_when_a_process_dies_the_others_end_with_an_error() -> None:
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, str(EXAMPLE), "--processes", "2", "--devices", "1", "--dies", "1", "--heartbeat", "5"]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0
    assert "bit for bit" not in done.stdout
    assert time.monotonic() - began < SECONDS  # It was not killed by us.


# ----------------------------------------------------------------------------------- the same in one process, by itself


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(None, "model"), P()], ids=str)
def test_a_part_that_is_all_lands_as_the_whole(mesh: Any, spec: P) -> None:
    sharding = NamedSharding(mesh, spec)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    with arenax.BufferPool(sharding) as pool:
        for _ in range(2):
            got = pool.put({"x": value}, local=True)["x"]
            expected = jax.make_array_from_process_local_data(sharding, value)
            assert got.sharding == expected.sharding
            np.testing.assert_array_equal(np.array(got), np.array(expected))
            del got
        with pool.step() as step:
            np.testing.assert_array_equal(np.array(step.put(jax.numpy.asarray(value), local=True)), value)
        assert pool.stats().creation_count == 1


def test_an_extent_that_all_know_chooses_the_class(mesh: Any) -> None:
    ragged = arenax.Ragged(1, arenax.SizeClasses.explicit([4, 8, 16]), pad_value=-1)
    with arenax.BufferPool(NamedSharding(mesh, P("data")), ragged) as pool:
        value = np.ones((4, 3), np.float32)
        got, size = pool.put(value, with_sizes=True, local=True, extent=9)
        assert got.shape == (4, 16)
        assert int(size) == 9
        assert (np.array(got)[:, 3:] == -1).all()
        got = pool.put(value, local=True)
        assert got.shape == (4, 4)
        with pytest.raises(ValueError, match="has 3 steps along its ragged axis, above the extent 2"):
            pool.put(value, local=True, extent=2)


def test_parts_are_for_pools_of_shardings() -> None:
    with arenax.BufferPool() as pool:
        for draw in (pool.put, pool.step().__enter__().put):
            with pytest.raises(ValueError, match="local=True is for a pool with a sharding"):
                draw(np.ones(3, np.float32), local=True)


class Half:
    """A sharding of two processes, seen by the second: it has the upper half of the mesh's rows."""

    def __init__(self, sharding: NamedSharding) -> None:
        self.spec = sharding.spec
        self.mesh = sharding.mesh
        self._sharding = sharding

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
        mine = {*self.mesh.devices[2:].flat}
        return {d: i for d, i in self._sharding.devices_indices_map(shape).items() if d in mine}


@pytest.mark.parametrize(
    ("spec", "shape", "whole", "index", "local"),
    [
        (P("data"), (4, 3), (8, 3), (slice(4, 6), slice(0, 3)), (slice(0, 2), slice(0, 3))),
        (P("data"), (4, 3), (8, 3), (slice(6, 8), slice(0, 3)), (slice(2, 4), slice(0, 3))),
        (P(None, "model"), (4, 6), (4, 6), (slice(0, 4), slice(3, 6)), (slice(0, 4), slice(3, 6))),
        (P(("data", "model")), (8,), (16,), (slice(10, 12),), (slice(2, 4),)),
        (P(), (5,), (5,), (slice(0, 5),), (slice(0, 5),)),
    ],
)
def test_shares_of_a_process(mesh: Any, spec: P, shape: Any, whole: Any, index: Any, local: Any) -> None:
    half: Any = Half(NamedSharding(mesh, spec))
    assert global_shape(shape, half, "x") == whole
    assert local_index(index, half) == local


def test_a_share_that_does_not_divide_is_refused(mesh: Any) -> None:
    half: Any = Half(NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"axis 0 of x has size 3 in process 0, which has 2 of the 4 shards"):
        global_shape((3, 2), half, "x")
    with pytest.raises(ValueError, match="has rank 0, and its sharding"):
        global_shape((), half, "x")
