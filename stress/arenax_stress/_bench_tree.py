"""`arenax bench tree`: batches of many small leaves, where the cost is the calls and not the bytes."""

from collections.abc import Sequence

import arenax

from ._bench_clock import Clock, calls_for, rounds_for
from ._bench_forms import landing_forms, ordinary, timed, verified
from ._bench_table import Column, Plot, Row, Table, ratio, size_text, verdict

FORMS = {"memcpy": "memcpy", "device_put": "device_put", "put": "pool.put", "step": "step.put"}
COLUMNS = (
    Column("leaf_count", "leaves", "count"),
    *(Column(f"{form}_seconds", heading, "seconds") for form, heading in FORMS.items()),
    Column("device_put_over_put", "dput/\nput", "ratio"),
    Column("device_put_over_step", "dput/\nstep", "ratio"),
    Column("put_seconds_per_leaf", "put,\na leaf", "seconds"),
    Column("step_seconds_per_leaf", "step,\na leaf", "seconds"),
)
PLOT = Plot("leaf_count", "leaves", "count", {f"{form}_seconds": label for form, label in FORMS.items()})


def measure_tree(
    clock: Clock, leaves: Sequence[int], leaf_bytes: int, rounds: int | None = None, quick: bool = False
) -> Table:
    """Times a dict of equal leaves by every form that takes one, and verifies every value once.

    Args:
        clock: Takes the times.
        leaves: Numbers of leaves.
        leaf_bytes: Bytes of each leaf, a multiple of 4.
        rounds: Rounds for each number; None chooses.
        quick: Whether to choose few.

    Returns:
        The table.
    """
    rows: list[Row] = []
    wrong: list[str] = []
    left_out: list[int] = []
    for count in leaves:
        if rows and clock.over:
            left_out.append(count)
            continue
        batch = {f"leaf{i:03}": ordinary(leaf_bytes, seed=i) for i in range(count)}
        with arenax.BufferPool(name="tree") as pool:
            pool.reserve(batch, slots=1)
            forms = landing_forms(batch, pool)
            what = f"{count} leaves"
            wrong += verified(forms, batch, what)
            timings = clock.measure(
                timed(forms),
                rounds=rounds_for(leaf_bytes * count, rounds, quick),
                calls=calls_for(leaf_bytes),
                what=what,
            )
        row: Row = {"leaf_count": count, "leaf_bytes": leaf_bytes, "rounds": timings["put"].rounds}
        for name in FORMS:
            row[f"{name}_seconds"] = timings[name].seconds
            row[f"{name}_faults"] = timings[name].faults
        for under in ("put", "step"):
            row[f"device_put_over_{under}"] = ratio(row["device_put_seconds"], row[f"{under}_seconds"])
            row[f"{under}_seconds_per_leaf"] = row[f"{under}_seconds"] / count
        rows.append(row)
    notes = [f"Out of time before {', '.join(map(str, left_out))} leaves."] if left_out else []
    said = [
        verdict(name, "device_put of the tree", rows, f"device_put_over_{key}", lambda row: f"{row['leaf_count']}")
        for key, name in (("put", "pool.put"), ("step", "step.put"))
    ]
    title = f"A dict of leaves of {size_text(leaf_bytes)}: time to bring it, medians"
    return Table("tree", title, COLUMNS, rows, "\n".join(said), notes, PLOT, wrong)
