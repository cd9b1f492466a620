"""`arenax bench sharded`: a batch that is cut over all devices of this process, by the pool and by `jax.device_put`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import arenax

from ._bench_clock import Clock, calls_for, rounds_for
from ._bench_forms import Form, See, landing_forms, ordinary, timed, verified
from ._bench_table import Column, Plot, Row, Table, ratio, size_text, verdict

FORMS = {"device_put": "device_put", "put": "pool.put", "step": "step.put"}
COLUMNS = (
    Column("size_bytes", "a device", "bytes"),
    *(Column(f"{form}_seconds", heading, "seconds") for form, heading in FORMS.items()),
    Column("device_put_over_put", "dput/\nput", "ratio"),
    Column("device_put_over_step", "dput/\nstep", "ratio"),
    Column("put_faults", "faults,\nput", "count"),
    Column("device_put_faults", "faults,\ndput", "count"),
)
PLOT = Plot("size_bytes", "size on each device", "bytes", {f"{form}_seconds": label for form, label in FORMS.items()})


def device_put_form(value: np.ndarray[Any, Any], sharding: NamedSharding) -> Form:
    """`jax.device_put` over a mesh."""

    def device_put(see: See) -> Any:
        return see(jax.device_put(value, sharding))

    return device_put


def measure_sharded(clock: Clock, sizes: Sequence[int], rounds: int | None = None, quick: bool = False) -> Table:
    """Times each form at every size, and verifies every value once.

    Args:
        clock: Takes the times.
        sizes: Bytes on each device, each a multiple of 4.
        rounds: Rounds at each size; None chooses by the size.
        quick: Whether to choose few.

    Returns:
        The table.
    """
    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    rows: list[Row] = []
    wrong: list[str] = []
    left_out: list[int] = []
    for size in sizes:
        if rows and clock.over:
            left_out.append(size)
            continue
        value = ordinary(size * len(devices)).reshape(len(devices), -1)
        with arenax.BufferPool(sharding, name="sharded") as pool:
            pool.reserve(value, slots=1)
            forms = landing_forms(value, pool) | {"device_put": device_put_form(value, sharding)}
            forms = {name: forms[name] for name in FORMS}
            where = size_text(size)
            wrong += verified(forms, value, where)
            timings = clock.measure(
                timed(forms), rounds=rounds_for(size, rounds, quick), calls=calls_for(size), what=where
            )
        row: Row = {"size_bytes": size, "rounds": timings["put"].rounds, "calls": timings["put"].calls}
        for name in FORMS:
            row[f"{name}_seconds"] = timings[name].seconds
            row[f"{name}_faults"] = timings[name].faults
        for under in ("put", "step"):
            row[f"device_put_over_{under}"] = ratio(row["device_put_seconds"], row[f"{under}_seconds"])
        rows.append(row)
    notes = [f"{len(devices)} devices; the first axis is cut among them. Every result is awaited."]
    if len(devices) == 1:
        notes.append("For more on CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8.")
    if left_out:
        notes.append(f"Out of time before {', '.join(map(size_text, left_out))}.")
    said = [
        verdict(name, "device_put", rows, f"device_put_over_{key}", lambda row: size_text(row["size_bytes"]))
        for key, name in (("put", "pool.put"), ("step", "step.put"))
    ]
    title = "One leaf over all devices: time to bring it, medians"
    return Table("sharded", title, COLUMNS, rows, "\n".join(said), notes, PLOT, wrong)
