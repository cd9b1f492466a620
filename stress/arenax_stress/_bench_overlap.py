"""Whether a landing and a computation that has nothing to do with it go on at the same time."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import arenax

from ._bench_clock import Clock
from ._bench_forms import landing_forms, ordinary, timed, verified
from ._bench_table import Column, Row, Table, ratio, share_text, size_text

LANDINGS = {"device_put": "device_put", "put": "pool.put", "step": "step.put"}
MAX_TURNS = 1_000_000


@jax.jit
def _compute(matrix: jax.Array, turns: Any) -> jax.Array:
    # The scale keeps the values from growing; the number of turns is an argument, so that one program serves them all.
    return lax.fori_loop(0, turns, lambda _, m: m @ matrix * (1 / matrix.shape[0]), matrix)


def _turns_for(seconds: float, matrix: jax.Array, clock: Clock) -> int:
    """The products that take about so long."""
    turns = 1
    while True:
        # By themselves: what a landing leaves behind would make a few of them look slow.
        compute = {"compute": lambda turns=turns: _compute(matrix, turns).block_until_ready()}
        took = clock.measure(compute, rounds=3, what="sizing")["compute"].seconds
        if took >= seconds / 2 or turns >= MAX_TURNS:
            return max(round(turns * seconds / took), 1)
        turns *= 2


def measure_overlap(clock: Clock, nbytes: int, rounds: int) -> Table:
    """Times a computation, a landing, and both issued together, for each way to land.

    The computation is as many matrix products as take about as long as the pool's landing, found by a short
    calibration.

    Args:
        clock: Takes the times.
        nbytes: Bytes of the leaf that is landed.
        rounds: Rounds of each.

    Returns:
        The table.
    """
    side = 256 if jax.default_backend() == "cpu" else 2048
    matrix = jnp.ones((side, side), jnp.float32)
    value = ordinary(nbytes)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(arenax.BufferPool())
        pool.reserve(value, slots=1)
        forms = {name: form for name, form in landing_forms(value, pool).items() if name in LANDINGS}
        wrong = verified(forms, value, size_text(nbytes))
        alone = timed(forms)
        landing_seconds = clock.measure({"put": alone["put"]}, rounds=3, what="sizing")["put"].seconds
        turns = _turns_for(landing_seconds, matrix, clock)

        def together(landing: Any) -> None:
            result = _compute(matrix, turns)  # Only dispatched: it runs while the landing does, where the device can.
            landing()
            result.block_until_ready()

        timings = clock.measure(
            {
                "compute": lambda: _compute(matrix, turns).block_until_ready(),
                **alone,
                **{f"{name}+": lambda landing=landing: together(landing) for name, landing in alone.items()},
            },
            rounds=rounds,
            what="overlap",
        )
    rows: list[Row] = []
    for name, label in LANDINGS.items():
        compute, landing, both = (timings[key].seconds for key in ("compute", name, f"{name}+"))
        rows.append(
            {
                "landing": label,
                "size_bytes": nbytes,
                "compute_seconds": compute,
                "landing_seconds": landing,
                "both_seconds": both,
                "both_over_sum": ratio(both, compute + landing),
                "overlap": ratio(compute + landing - both, min(compute, landing)),
                "rounds": timings[name].rounds,
            }
        )
    columns = (
        Column("landing", "landing", "text"),
        Column("compute_seconds", "compute alone", "seconds"),
        Column("landing_seconds", "landing alone", "seconds"),
        Column("both_seconds", "both", "seconds"),
        Column("both_over_sum", "both / sum", "ratio"),
        Column("overlap", "overlap", "share"),
    )
    notes = [
        f"Compute: {turns:,} products of {side} × {side} float32. On CPU both want the same cores.",
        "Overlap is the time saved over the shorter of the two: 100% where that is hidden, below 0 where they hinder.",
    ]
    conclusion = " ".join(f"{row['landing']} overlaps by {share_text(row['overlap'])}." for row in rows)
    title = f"A landing of {size_text(nbytes)} beside a computation, medians"
    return Table("overlap", title, columns, rows, conclusion, notes, None, wrong)
