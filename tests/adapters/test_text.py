"""Rows of tokens are padded to a size class, with their lengths and a mask."""

import subprocess
import sys

import numpy as np
import pytest

import arenax
from arenax_adapters.text import PadTokens

CLASSES = arenax.SizeClasses.explicit([4, 8, 16])


def test_rows_go_to_the_smallest_class_that_holds_the_longest() -> None:
    batch = PadTokens(CLASSES, pad_id=-1)([[1, 2, 3, 4, 5], np.arange(2), ()])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, -1, -1, -1], [0, 1, *[-1] * 6], [-1] * 8]
    assert batch["tokens"].dtype == np.int32
    assert batch["lengths"].tolist() == [5, 2, 0]
    assert batch["mask"].tolist() == [[True] * 5 + [False] * 3, [True] * 2 + [False] * 6, [False] * 8]


def test_several_rows_a_sample_and_what_is_no_row() -> None:
    samples = [{"ids": [1, 2], "labels": [3, 4], "y": 7.5}, {"ids": [5], "labels": [6], "y": 8.5}]
    batch = PadTokens((4,), keys=("ids", "labels"), pad_id={"labels": -100}, dtype="int64")(samples)
    assert batch["ids"].tolist() == [[1, 2, 0, 0], [5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[3, 4, -100, -100], [6, -100, -100, -100]]
    assert batch["y"].tolist() == [7.5, 8.5]
    assert batch["ids"].dtype == np.int64
    assert list(batch) == ["ids", "labels", "y", "lengths", "mask"]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[0] * 17], "a row of 17 tokens is above the largest size class, 16"),
        ([], "no samples"),
        ([{"x": [1]}], r"none of the entries \('tokens',\), but \['x'\]"),
        ([{"tokens": [1]}, {"tokens": [1], "y": 0}], "differ in their entries"),
    ],
)
def test_what_cannot_be_batched(samples: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PadTokens(CLASSES)(samples)


def test_rows_of_one_sample_have_one_length() -> None:
    with pytest.raises(ValueError, match="'b' and of 'a' differ in length"):
        PadTokens(CLASSES, keys=("a", "b"))([{"a": [1, 2], "b": [1]}])


def test_entries_that_would_be_overwritten() -> None:
    with pytest.raises(ValueError, match=r"have entries \['mask'\], which PadTokens makes itself"):
        PadTokens(CLASSES)([{"tokens": [1], "mask": [1]}])


def test_bad_classes_and_pads() -> None:
    with pytest.raises(ValueError, match="size_classes must be integers of at least 1"):
        PadTokens((0, 4))
    with pytest.raises(ValueError, match=r"pad_id names \['label'\], which are none of the keys"):
        PadTokens(CLASSES, pad_id={"label": -100})


def test_without_classes_or_keys() -> None:
    with pytest.raises(ValueError, match="size_classes must have at least one"):
        PadTokens(())
    with pytest.raises(ValueError, match="keys must name at least one"):
        PadTokens(CLASSES, keys=())


def test_a_step_compiles_once_a_size_class() -> None:
    rng = np.random.default_rng(0)
    collate = PadTokens(CLASSES)
    with arenax.BufferPool() as pool:
        for n in range(1, 17):
            batch = collate([rng.integers(0, 9, rng.integers(0, n + 1)) for _ in range(3)] + [np.arange(n)])
            landed = pool.put(batch)
            assert np.array_equal(landed["tokens"], batch["tokens"])
            assert landed["tokens"].shape[1] in CLASSES.boundaries
            del landed
        assert len({c.shape for c in pool.stats().by_class if c.dtype == np.int32 and len(c.shape) == 2}) == 3


def test_workers_need_no_jax() -> None:
    code = (
        "import pickle, sys; from arenax_adapters.text import PadTokens; PadTokens((4,))([[1]]); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
