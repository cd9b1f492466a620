"""The demo's loop without size classes: the pool's warning says what to write, and that ends the compiles."""

import re
import warnings
from collections.abc import Sequence

import jax
import pytest

import arenax
from arenax_stress._demo_run import collate, longest, pooled
from arenax_stress._model import init, train_step

LENGTHS = (40, 24, 30, 21, 36, 28, 33, 26)


def run(pool: arenax.BufferPool, batches: Sequence[Sequence[bytes]]) -> list[float]:
    """The demo's loop."""
    state, losses = init(0), []
    for texts in batches:
        with pooled(pool)(texts) as batch:
            state, loss = train_step(state, batch["tokens"], batch["lengths"])
            losses.append(float(loss))
            del batch
    return losses


def test_the_warning_pasted_into_the_demo_ends_its_compiles() -> None:
    batches = [[bytes(range(32, 32 + n)), b"short"] for n in LENGTHS]
    jax.clear_caches()
    with jax.numpy_dtype_promotion("standard"):  # As in a user's program.
        paste(batches)


def paste(batches: Sequence[Sequence[bytes]]) -> None:
    with arenax.BufferPool() as pool:
        with pytest.warns(RuntimeWarning, match="is compiled anew for each") as caught:
            exact = run(pool, batches)
        assert sum(c.count for c in pool.compiles if "train_step" in c.function) == len(LENGTHS)
    (warning,) = caught
    written = re.search(r"BufferPool\((ragged=.*)\), with a boundary", str(warning.message))
    assert written
    ragged = eval(f"dict({written[1]})")["ragged"]
    assert ragged["lengths"] is None
    assert ragged["tokens"].axis == 1
    classes = ragged["tokens"].size_classes
    assert classes.maximum == max(LENGTHS)
    with warnings.catch_warnings(), arenax.BufferPool(ragged=ragged) as mended:
        warnings.simplefilter("error")
        padded = run(mended, batches)
        count = sum(c.count for c in mended.compiles if "train_step" in c.function)
        # A length that is a boundary has its program already.
        assert count <= len({classes.class_of(n) for n in LENGTHS} - {*LENGTHS})
        before = len(mended.compiles)
        assert run(mended, batches) == padded
        assert len(mended.compiles) == before
    assert padded == pytest.approx(exact, rel=1e-4)
    assert collate(batches[0], longest(batches[0]))["tokens"].shape == (2, 40)
