"""`arenax bench fit` times the fit, and finds out where it is not the optimum."""

import json
from pathlib import Path

import numpy as np
import pytest

from arenax import SizeClasses
from arenax_stress import _bench_fit, cli
from arenax_stress._bench_clock import Clock


def test_the_table_has_times_and_paddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "fit.json"
    assert cli.main(["bench", "fit", "--lengths", "3000", "--classes", "4", "--rounds", "3", "--json", str(to)]) == 0
    assert "exact optimum" in " ".join(capsys.readouterr().out.split())
    (table,) = json.loads(to.read_text())["tables"].values()
    assert [row["lengths"] for row in table["rows"]] == [*_bench_fit.DRAWS]
    for row in table["rows"]:
        assert row["fit_seconds"] > 0
        assert row["fitted_padding"] <= row["quantiles_padding"]


def test_the_plain_program_is_the_optimum() -> None:
    values = np.array([1, 2, 3, 50, 60, 100])
    assert _bench_fit.least(values, 1) == 600
    assert _bench_fit.least(values, 2) == 3 * 3 + 3 * 100
    assert _bench_fit.least(values, 6) == values.sum()


def test_a_fit_that_is_not_the_optimum_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeClasses, "fit", lambda lengths, *_: SizeClasses.explicit([max(lengths)]))
    table = _bench_fit.measure_fit(Clock(), 500, 4, 3)
    assert len(table.wrong) == 3
    assert "not the optimum" in table.wrong[0]
