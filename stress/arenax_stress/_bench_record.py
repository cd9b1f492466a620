"""`arenax bench put`, its second table: what a recording adds to a put and to a step."""

import contextlib
import statistics
from collections.abc import Callable

import arenax
from arenax._record import CHUNK

from ._bench_clock import WARM_UP, Clock
from ._bench_forms import Form, landing_forms, ordinary, wait
from ._bench_table import Column, Row, Table, size_text, time_text

LEAF_BYTES = 4096
CALLS = 50
# Less than a chunk of the recording, also where a call is two events: not written before it is asked for.
UNWRITTEN = CHUNK // 2 - 50
WRITES = 15
ALLOWED_SECONDS = 1e-6
FORMS: dict[str, str] = {"put": "pool.put", "step": "step.put"}
COLUMNS = (
    Column("form", "", "text"),
    Column("plain_seconds", "plain", "seconds"),
    Column("recorded_seconds", "recorded", "seconds"),
    Column("noted_seconds", "added by\nnoting", "seconds"),
    Column("written_seconds", "\nwriting", "seconds"),
    Column("added_seconds", "\nboth", "seconds"),
)


def measure_recording(clock: Clock, turns: int) -> Table:
    """Times one small leaf with and without a recording, block by block in turn.

    What a recording adds is far below what a put differs by from one call to the next, so that it is the median over
    many turns of the difference in each. The file is written once in a thousand puts, which no median sees: that is
    timed by itself, and shared out. There are two equal pools, and halfway it is the other one that records, so that
    what sets them apart (where their slots lie) cancels out.

    Args:
        clock: Takes the times.
        turns: Pairs of samples of each form, at least 2.

    Returns:
        The table.
    """
    value = ordinary(LEAF_BYTES)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(arenax.BufferPool(name=name)) for name in ("this", "that")]
        for pool in pools:
            pool.reserve(value, slots=1)
        forms = [landing_forms(value, pool) for pool in pools]
        written = _writing(clock, pools[0], forms[0]["put"])
        for name, heading in FORMS.items():
            row = _row(clock, pools, [f[name] for f in forms], turns)
            row["written_seconds"] = written
            row["added_seconds"] = row["noted_seconds"] + written
            rows.append({"form": heading, "leaf_bytes": LEAF_BYTES, "calls": CALLS} | row)
    note = (
        f"One leaf of {size_text(LEAF_BYTES)}, {rows[0]['turns']:,} turns of {CALLS} calls with and {CALLS} without: "
        "noting is the median of the differences,\nwriting what the file costs, shared out among the calls."
    )
    return Table("record", "What a recording adds, medians", COLUMNS, rows, _conclusion(rows), [note])


def _row(clock: Clock, pools: list[arenax.BufferPool], forms: list[Form], turns: int) -> Row:
    took: dict[str, list[float]] = {"plain": [], "recorded": []}
    for half in (0, 1):
        with pools[half].record():
            pair = {"recorded": forms[half], "plain": forms[1 - half]}
            for turn in range(WARM_UP + max(turns // 2, 1)):
                # Every second turn in the other order, so that neither always comes after the other.
                for name in pair if turn % 2 == 0 else reversed(pair):
                    seconds = _block(clock, pair[name], CALLS)
                    if turn >= WARM_UP:
                        took[name].append(seconds / CALLS)
                clock.progress("recording", half * turns // 2 + max(turn + 1 - WARM_UP, 0), turns)
    noted = [r - p for r, p in zip(took["recorded"], took["plain"], strict=True)]
    return {
        "turns": len(noted),
        "plain_seconds": statistics.median(took["plain"]),
        "recorded_seconds": statistics.median(took["recorded"]),
        "noted_seconds": statistics.median(noted),
    }


def _writing(clock: Clock, pool: arenax.BufferPool, form: Form) -> float:
    """Seconds a call that the writing of a recording takes."""

    def write() -> float:
        _block(clock, form, UNWRITTEN)
        start = clock.timer()
        pool.arena.write_recording(recorder)
        return clock.timer() - start

    with pool.record():
        (recorder,) = pool.arena.recorders
        return statistics.median(write() for _ in range(WRITES)) / UNWRITTEN


def _block(clock: Clock, form: Callable[..., object], calls: int) -> float:
    start = clock.timer()
    for _ in range(calls):
        form(wait)
    return clock.timer() - start


def _conclusion(rows: list[Row]) -> str:
    parts = [f"{time_text(row['added_seconds'])} to a {row['form']}" for row in rows]
    most = max(row["added_seconds"] for row in rows)
    claim = "within" if most <= ALLOWED_SECONDS else "MORE THAN"
    return f"A recording adds {' and '.join(parts)}, {claim} the microsecond that it may cost."
