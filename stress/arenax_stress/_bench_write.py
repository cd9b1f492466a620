"""The third part of `arenax bench lease`: a small write costs the same in a small slot and in a large one."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import arenax

from ._bench_clock import BLOCK, Clock
from ._bench_forms import Array, ordinary
from ._bench_table import NOISE, Column, Plot, Row, Table, ratio, size_text, time_text, verdict

VALUE_BYTES = 4096
COLUMNS = (
    Column("slot_bytes", "slot", "bytes"),
    Column("write_seconds", "lease.write,\nslots in turn", "seconds"),
    Column("write_over_smallest", "/ first\nslot", "ratio"),
    Column("beside_seconds", "lease.write,\nbeside", "seconds"),
    Column("undonated_seconds", "not\ndonated", "seconds"),
    Column("undonated_over_beside", "not donated/\nbeside", "ratio"),
    Column("beside_faults", "faults,\nwrite", "count"),
    Column("undonated_faults", "faults,\nnot donated", "count"),
)


@jax.jit
def _copied(slot: jax.Array, value: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(slot, value, (start,))


@attrs.frozen
class _Target:
    """A leased slot, and where the value goes: its middle."""

    lease: arenax.Lease
    value: Array
    at: int
    address: int

    @property
    def size(self) -> int:
        return self.lease.shape[0] * 4

    @property
    def window(self) -> slice:
        return slice(self.at, self.at + len(self.value))

    def write(self) -> None:
        self.lease.write(self.value, at=(self.at,))
        self.lease.array.block_until_ready()

    def undonated(self) -> Callable[[], jax.Array]:
        """The same update of an array of its own, which XLA must copy."""
        plain = jnp.zeros(self.lease.shape, jnp.float32)
        return lambda: _copied(plain, self.value, np.int32(self.at)).block_until_ready()

    def wrong(self, array: Any) -> bool:
        return not np.array_equal(np.asarray(array[self.window]), self.value)


def measure_writes(clock: Clock, sizes: Sequence[int], rounds: int) -> Table:
    """Times a small write into slots of several sizes in turn, then each beside the same update without donation.

    Args:
        clock: Takes the times.
        sizes: Bytes of the slots, each a multiple of 4 and at least 4 KiB.
        rounds: Rounds of each measurement.

    Returns:
        The table.
    """
    wrong: list[str] = []
    left_out: list[int] = []
    rows: list[Row] = []
    value = ordinary(VALUE_BYTES).reshape(-1)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(arenax.BufferPool(name="write"))
        targets: dict[str, _Target] = {}
        for size in sizes:
            lease = stack.enter_context(pool.lease((size // 4,), "float32"))
            at = (size // 4 - len(value)) // 2
            targets[size_text(size)] = _Target(lease, value, at, lease.array.unsafe_buffer_pointer())
        alone = clock.measure(
            {name: target.write for name, target in targets.items()}, rounds=rounds, calls=BLOCK, what="writes"
        )
        first = next(iter(alone.values())).seconds
        for name, target in targets.items():
            row: Row = {
                "slot_bytes": target.size,
                "value_bytes": VALUE_BYTES,
                "write_seconds": alone[name].seconds,
                "write_over_smallest": ratio(alone[name].seconds, first),
                "rounds": alone[name].rounds,
            }
            rows.append(row)
            if len(rows) > 1 and clock.over:
                left_out.append(target.size)
                continue
            undonated = target.undonated()
            if target.wrong(target.lease.array):
                wrong.append(f"lease.write brought wrong values into a slot of {name}")
            if target.wrong(undonated()):
                wrong.append(f"the undonated update brought wrong values into a slot of {name}")
            timings = clock.measure(
                {"beside": target.write, "undonated": undonated},
                rounds=rounds,
                calls={"beside": BLOCK, "undonated": BLOCK if target.size <= 2**20 else 1},
                what=f"a slot of {name}",
            )
            for form, timing in timings.items():
                row[f"{form}_seconds"], row[f"{form}_faults"] = timing.seconds, timing.faults
            row["undonated_over_beside"] = ratio(row["undonated_seconds"], row["beside_seconds"])
        for name, target in targets.items():
            if target.lease.array.unsafe_buffer_pointer() != target.address:
                wrong.append(f"a slot of {name} moved while it was written")
    notes = ["Beside: in turn with the update that is not donated, whose copies disturb it."]
    if left_out:
        notes.append(f"Out of time before the contrast at {', '.join(map(size_text, left_out))}.")
    title = f"A write of {size_text(VALUE_BYTES)} into a slot, medians"
    lines = {"write_seconds": "lease.write", "undonated_seconds": "not donated"}
    plot = Plot("slot_bytes", "size of the slot", "bytes", lines)
    return Table("write", title, COLUMNS, rows, _write_conclusion(rows), notes, plot, wrong)


def _write_conclusion(rows: Sequence[Row]) -> str:
    costs = [row["write_seconds"] for row in rows]
    spread = max(costs) / min(costs)
    if len(rows) == 1:
        said = f"A write took {time_text(costs[0])}"
    elif spread <= NOISE:
        said = f"A write took {time_text(min(costs))} to {time_text(max(costs))}, whatever the slot's size"
    else:
        said = f"A write took {time_text(min(costs))} to {time_text(max(costs))}: it DEPENDS on the slot's size"
    against = verdict(
        "lease.write",
        "an update without donation",
        rows,
        "undonated_over_beside",
        lambda row: size_text(row["slot_bytes"]),
    )
    return f"{said}.\n{against}"
