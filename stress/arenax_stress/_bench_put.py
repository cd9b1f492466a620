"""`arenax bench put`: one leaf, from a few KiB to hundreds of MiB, by every way there is to bring it."""

import contextlib
from collections.abc import Sequence
from typing import Any

import arenax

from ._bench_clock import Clock, Timing, calls_for, rounds_for
from ._bench_forms import NO_REF, REF, Form, array_form, landing_forms, ordinary, put_form, ref_form, timed, verified
from ._bench_table import Column, Plot, Row, Table, factor_text, ratio, size_text, verdict

FORMS = {
    "memcpy": "memcpy",
    "device_put": "device_put",
    "array": "jnp.array",
    "new_ref": "new_ref",
    "put": "pool.put",
    "step": "step.put",
    "ring": "put, ring",
}
COLUMNS = (
    Column("size_bytes", "size", "bytes"),
    *(Column(f"{form}_seconds", heading, "seconds") for form, heading in FORMS.items()),
    Column("device_put_over_put", "dput/\nput", "ratio"),
    Column("device_put_over_step", "dput/\nstep", "ratio"),
    Column("put_over_memcpy", "put/\nmemcpy", "ratio"),
    Column("put_faults", "faults,\nput", "count"),
    Column("device_put_faults", "faults,\ndput", "count"),
)
PLOT = Plot("size_bytes", "size of the leaf", "bytes", {f"{form}_seconds": label for form, label in FORMS.items()})


def measure_put(clock: Clock, sizes: Sequence[int], rounds: int | None = None, quick: bool = False) -> Table:
    """Times every form at every size, and verifies every value once.

    Args:
        clock: Takes the times.
        sizes: Bytes of the leaf, each a multiple of 4.
        rounds: Rounds at each size; None chooses by the size.
        quick: Whether to choose few.

    Returns:
        The table.
    """
    rows: list[Row] = []
    wrong: list[str] = []
    left_out: list[int] = []
    same_landing = False
    for size in sizes:
        if rows and clock.over:
            left_out.append(size)
            continue
        value = ordinary(size)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(arenax.BufferPool(name="put"))
            ring = stack.enter_context(arenax.BufferPool(name="ring", landing="ring"))
            forms = landing_forms(value, pool) | {"array": array_form(value)}
            if (new_ref := ref_form(value)) is not None:
                forms["new_ref"] = new_ref
            pool.reserve(value, slots=1)
            # Where the ring is what a pool takes anyway, its column would be the same figure twice.
            same_landing = type(pool.landing) is type(ring.landing)
            if not same_landing:
                ring.reserve(value, slots=1)
                forms["ring"] = put_form(value, ring)
            forms = {name: forms[name] for name in FORMS if name in forms}
            where = size_text(size)
            wrong += verified(forms, value, where)
            timings = clock.measure(
                timed(forms), rounds=rounds_for(size, rounds, quick), calls=calls_for(size), what=where
            )
        rows.append(_row(size, forms, timings))
    notes = [
        "memcpy is np.copyto into memory that is there; every other result is awaited; dput is device_put.",
        "Sources lie at 16 bytes modulo 64, as NumPy's large arrays do: JAX on CPU aliases those at a multiple of 64.",
    ]
    if REF is None:
        notes.append(NO_REF)
    if same_landing:
        notes.append("The ring is what pool.put uses on this device anyway: its own column is empty.")
    if left_out:
        notes.append(f"Out of time before {', '.join(map(size_text, left_out))}.")
    return Table("put", "One leaf: time to bring it, medians", COLUMNS, rows, _conclusion(rows), notes, PLOT, wrong)


def _row(size: int, forms: dict[str, Form], timings: dict[str, Timing]) -> Row:
    row: Row = {"size_bytes": size, "rounds": timings["put"].rounds, "calls": timings["put"].calls}
    for name in FORMS:
        row[f"{name}_seconds"] = timings[name].seconds if name in forms else None
        row[f"{name}_faults"] = timings[name].faults if name in forms else None
    for over, under in (
        ("device_put", "put"),
        ("device_put", "step"),
        ("put", "memcpy"),
        ("device_put", "ring"),
        ("new_ref", "put"),
        ("new_ref", "step"),
    ):
        row[f"{over}_over_{under}"] = ratio(row[f"{over}_seconds"], row[f"{under}_seconds"])
    return row


def _conclusion(rows: Sequence[Row]) -> str:
    def where(row: dict[str, Any]) -> str:
        return size_text(row["size_bytes"])

    said = [
        verdict("pool.put", "device_put", rows, "device_put_over_put", where),
        verdict("step.put", "device_put", rows, "device_put_over_step", where),
    ]
    if any(row["new_ref_seconds"] is not None for row in rows):
        said.append(verdict("step.put", "a jitted write into new_ref", rows, "new_ref_over_step", where))
    if any(row["ring_seconds"] is not None for row in rows):
        said.append(verdict("The ring", "device_put", rows, "device_put_over_ring", where))
    last = rows[-1]
    said.append(
        f"At {where(last)} pool.put takes {factor_text(last['put_over_memcpy'])}× as long as a memcpy, and "
        f"{last['put_faults']:,.3g} page faults a call where device_put takes {last['device_put_faults']:,.0f}."
    )
    return "\n".join(said)
