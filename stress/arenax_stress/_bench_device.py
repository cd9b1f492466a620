"""`arenax bench device`: what only an accelerator can tell, within a budget of seconds; it runs on CPU too."""

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import numpy as np

import arenax
from arenax._compiles import CompileCounter
from arenax._ring import PinnedRing

from ._bench_clock import Clock, calls_for, rounds_for
from ._bench_forms import Form, default_device, ordinary, put_form, timed, verified
from ._bench_overlap import measure_overlap
from ._bench_put import measure_put
from ._bench_table import Column, Plot, Row, Table, ratio, size_text, verdict

Section = Callable[[Clock], Table]


@attrs.frozen
class Plan:
    """What to measure on the device.

    Attributes:
        sizes: Bytes of the leaf in the table of `arenax bench put`.
        chunks: Bytes of the ring's chunks.
        ring_bytes: The leaf that goes through each of these rings; also what is overlapped with compute.
        steps: Steps in which the addresses are watched.
        rounds: Rounds of each measurement; None chooses by the size.
        quick: Whether to choose few.
    """

    sizes: Sequence[int]
    chunks: Sequence[int]
    ring_bytes: int
    steps: int
    rounds: int | None = None
    quick: bool = False


def measure_device(clock: Clock, plan: Plan) -> list[Table]:
    """Measures all of it, each part with its share of the clock's budget.

    Args:
        clock: Takes the times; what it has no time for is left out, and a note says so.
        plan: What to measure.

    Returns:
        The tables.
    """
    parts: list[tuple[float, Section]] = [
        (6, lambda clock: measure_put(clock, plan.sizes, plan.rounds, plan.quick)),
        (3, lambda clock: measure_chunks(clock, plan)),
        (2, lambda clock: measure_pinned(clock, plan)),
        (2, lambda clock: measure_overlap(clock, plan.ring_bytes, plan.rounds or (5 if plan.quick else 15))),
        (3, lambda clock: measure_addresses(clock, plan.steps)),
    ]
    tables: list[Table] = []
    before = default_device().memory_stats()
    for i, (weight, section) in enumerate(parts):
        with clock.share(weight / sum(w for w, _ in parts[i:])):
            tables.append(section(clock))
    gc.collect()
    return [*tables, memory_table(before, default_device().memory_stats())]


def memory_kinds(device: Any) -> set[str]:
    """The kinds of memory that a device can address."""
    return {memory.kind for memory in device.addressable_memories()}


def measure_chunks(clock: Clock, plan: Plan) -> Table:
    """Times the pinned ring with chunks of several sizes, in turn."""
    value = ordinary(plan.ring_bytes)
    device = default_device()
    if "pinned_host" not in memory_kinds(device):
        notes = ["This device has no pinned_host memory, and so no ring."]
        return Table("chunks", "The pinned ring", (), (), "No ring was measured.", notes)
    forms: dict[str, Form] = {}
    rings: dict[str, PinnedRing] = {}
    with contextlib.ExitStack() as stack:
        for chunk in plan.chunks:
            ring = rings[str(chunk)] = PinnedRing(device, False, CompileCounter(), chunk_bytes=chunk)
            pool = stack.enter_context(arenax.BufferPool(ring))
            pool.reserve(value, slots=1)
            forms[str(chunk)] = put_form(value, pool)
        forms["device_put"] = lambda see: see(jax.device_put(value))
        what = f"ring, {size_text(plan.ring_bytes)}"
        wrong = verified(forms, value, what)
        timings = clock.measure(
            timed(forms),
            rounds=rounds_for(plan.ring_bytes, plan.rounds, plan.quick),
            calls=calls_for(plan.ring_bytes),
            what=what,
        )
    rows: list[Row] = [
        {
            "size_bytes": plan.ring_bytes,
            "chunk_bytes": chunk,
            "placing": rings[str(chunk)].form,
            "put_seconds": timings[str(chunk)].seconds,
            "put_bytes_per_second": ratio(plan.ring_bytes, timings[str(chunk)].seconds),
            "put_faults": timings[str(chunk)].faults,
            "device_put_seconds": timings["device_put"].seconds,
            "device_put_over_put": ratio(timings["device_put"].seconds, timings[str(chunk)].seconds),
            "rounds": timings["device_put"].rounds,
        }
        for chunk in plan.chunks
    ]
    columns = (
        Column("chunk_bytes", "chunk", "bytes"),
        Column("put_seconds", "pool.put", "seconds"),
        Column("put_bytes_per_second", "rate", "rate"),
        Column("device_put_seconds", "device_put", "seconds"),
        Column("device_put_over_put", "device_put / put", "ratio"),
        Column("put_faults", "faults, put", "count"),
        Column("placing", "placing", "text"),
    )
    best = min(rows, key=lambda row: row["put_seconds"])
    conclusion = f"Chunks of {size_text(best['chunk_bytes'])} were the fastest here. " + verdict(
        "The ring", "device_put", rows, "device_put_over_put", lambda row: size_text(row["chunk_bytes"])
    )
    notes = ["Placing: by one program (fused) or two (split), as the ring found out; none where one chunk takes all."]
    plot = Plot(
        "chunk_bytes",
        "chunk of the ring",
        "bytes",
        {"put_seconds": "pool.put", "device_put_seconds": "device_put"},
        f"time to bring {size_text(plan.ring_bytes)}",
    )
    title = f"The pinned ring at several sizes of its chunks, a leaf of {size_text(plan.ring_bytes)}, medians"
    return Table("chunks", title, columns, rows, conclusion, notes, plot, wrong)


def measure_pinned(clock: Clock, plan: Plan) -> Table:
    """Times the transfer from pageable and from pinned host memory."""
    device = default_device()
    kinds = memory_kinds(device)
    rows: list[Row] = []
    notes: list[str] = []
    wrong: list[str] = []
    if "pinned_host" not in kinds:
        notes.append(f"This device has no pinned_host memory, only {', '.join(sorted(kinds))}.")
    left_out: list[int] = []
    home = jax.sharding.SingleDeviceSharding(device)
    for size in plan.sizes:
        if rows and clock.over:
            left_out.append(size)
            continue
        if "pinned_host" not in kinds:
            break
        value = ordinary(size)
        pinned = jax.device_put(value, home.with_memory_kind("pinned_host")).block_until_ready()
        forms: dict[str, Form] = {
            "pageable": lambda see, value=value: see(jax.device_put(value, home)),
            "pinned": lambda see, pinned=pinned: see(jax.device_put(pinned, home)),
        }
        what = f"pinned, {size_text(size)}"
        wrong += verified(forms, value, what)
        timings = clock.measure(
            timed(forms), rounds=rounds_for(size, plan.rounds, plan.quick), calls=calls_for(size), what=what
        )
        row: Row = {"size_bytes": size, "rounds": timings["pinned"].rounds}
        for name in forms:
            row[f"{name}_seconds"] = timings[name].seconds
            row[f"{name}_faults"] = timings[name].faults
            row[f"{name}_bytes_per_second"] = ratio(size, timings[name].seconds)
        row["pageable_over_pinned"] = ratio(row["pageable_seconds"], row["pinned_seconds"])
        rows.append(row)
    if left_out:
        notes.append(f"Out of time before {', '.join(map(size_text, left_out))}.")
    columns = (
        Column("size_bytes", "size", "bytes"),
        Column("pageable_seconds", "pageable", "seconds"),
        Column("pinned_seconds", "pinned", "seconds"),
        Column("pageable_over_pinned", "pageable / pinned", "ratio"),
        Column("pageable_bytes_per_second", "rate, pageable", "rate"),
        Column("pinned_bytes_per_second", "rate, pinned", "rate"),
    )
    conclusion = verdict(
        "A transfer from pinned memory",
        "one from pageable memory",
        rows,
        "pageable_over_pinned",
        lambda row: size_text(row["size_bytes"]),
    )
    plot = Plot("size_bytes", "size of the leaf", "bytes", {"pageable_seconds": "pageable", "pinned_seconds": "pinned"})
    title = "jax.device_put from pageable and from pinned host memory, medians"
    return Table("pinned", title, columns, rows, conclusion, notes, plot, wrong)


def measure_addresses(clock: Clock, steps: int) -> Table:
    """Counts the places that batches come in, over many steps that may not create, copy, spill or compile."""
    batch = {"x": ordinary(64 * 2**10), "y": ordinary(64 * 2**10, seed=1), "z": np.arange(256, dtype=np.int32)}
    addresses: set[int] = set()
    wrong: list[str] = []
    done = 0
    with arenax.BufferPool(name="addresses") as pool:
        pool.reserve(batch, slots=1)

        def once() -> None:
            with pool.step() as step:
                arrays = jax.block_until_ready(step.put(batch))
                addresses.update(x.unsafe_buffer_pointer() for x in arrays.values())

        once()  # Compiles the landing, which steady() would refuse.
        created = pool.stats().creation_count
        try:
            with pool.steady():
                for done in range(1, steps + 1):
                    once()
                    if done % 100 == 0:
                        clock.progress("steps", done, steps)
                        if clock.over:
                            break
        except arenax.NotSteady as e:
            wrong.append(f"the pool was not steady in step {done}: {e}")
        stats = pool.stats()
    row: Row = {
        "step_count": done,
        "planned_step_count": steps,
        "slot_count": stats.slot_count,
        "address_count": len(addresses),
        "copy_count": stats.copy_count,
        "creation_count": stats.creation_count - created,
        "spill_count": stats.spill_count,
    }
    if len(addresses) != stats.slot_count:
        wrong.append(f"{stats.slot_count} slots were seen at {len(addresses)} addresses in {done} steps")
    columns = (
        Column("step_count", "steps", "count"),
        Column("slot_count", "slots", "count"),
        Column("address_count", "addresses", "count"),
        Column("copy_count", "copies", "count"),
        Column("creation_count", "created", "count"),
        Column("spill_count", "spilled", "count"),
    )
    notes = [f"Out of time after {done:,} of {steps:,} steps."] if done < steps and not wrong else []
    conclusion = (
        "It did NOT hold still: " + "; ".join(wrong) + "."
        if wrong
        else f"{done:,} steps came in the {stats.slot_count} buffers of the reservation: nothing was created, copied, "
        "spilled or compiled."
    )
    title = "Where batches of three leaves lie, step after step"
    return Table("addresses", title, columns, [row], conclusion, notes, None, wrong)


def memory_table(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Table:
    """What the device says of its memory before and after all of it."""
    rows: list[Row] = []
    notes: list[str] = []
    if before is None or after is None:
        notes.append("Device.memory_stats() is None on this device: it reports nothing.")
        conclusion = "The device reports no figures."
    else:
        rows = [
            {"figure": key, "before": before.get(key, 0), "after": value, "change": value - before.get(key, 0)}
            for key, value in after.items()
        ]
        change = after.get("bytes_in_use", 0) - before.get("bytes_in_use", 0)
        conclusion = f"After all pools were closed, {size_text(change)} more are in use than before."
    columns = tuple(Column(key, key, "text" if key == "figure" else "count") for key in _MEMORY)
    return Table("memory", "Device.memory_stats() before and after", columns, rows, conclusion, notes)


_MEMORY = ("figure", "before", "after", "change")
