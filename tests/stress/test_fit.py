"""`arenax fit` prints, draws and writes the classes that pad a list of lengths least."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from arenax import SizeClasses
from arenax_stress import cli


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    drawn = np.random.default_rng(0).lognormal(5, 0.8, 3000).astype(int) + 1
    path.write_text("\n".join(map(str, drawn)))
    return path


def test_the_boundaries_are_ready_to_paste(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", str(lengths), "--max-classes", "5", "--multiple-of", "8"]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"arenax\.SizeClasses\.explicit\((\[.*\])\)", printed)
    assert found
    assert tuple(json.loads(found[1])) == SizeClasses.fit(lengths, 5, 8).boundaries
    assert all(
        name in printed for name in ("fitted", "quantiles", "powers of two", "multiples of 128", "3,000 lengths")
    )


def test_json_and_plot(lengths: Path, tmp_path: Path) -> None:
    to, picture = tmp_path / "fit.json", tmp_path / "fit.png"
    assert cli.main(["fit", str(lengths), "--slots", "2", "--json", str(to), "--plot", str(picture)]) == 0
    found = json.loads(to.read_text())
    fitted = SizeClasses.fit(lengths, 8)
    assert tuple(found["boundaries"]) == fitted.boundaries
    assert sum(c["share"] for c in found["classes"]) == pytest.approx(1)
    assert [c["reserved"] for c in found["classes"]] == [2 * b for b in fitted.boundaries]
    by_name = {c["classes"]: c for c in found["choices"]}
    assert by_name["fitted"]["padding"] == fitted.padding_overhead(lengths)
    assert by_name["fitted"]["padding"] < by_name["quantiles"]["padding"] < by_name["one"]["padding"]
    assert [c["programs"] for c in found["curve"]] == [*range(1, 9)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("3, 3 3\n100"))
    assert cli.main(["fit", "-"]) == 0
    assert "explicit([3, 100])" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"), [("", "no lengths"), ("1 x", "must hold integers"), ("-4", "at least 0, got -4")]
)
def test_bad_lengths(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert cli.main(["fit", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", str(tmp_path / "nothing")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-gain", "1"], "--min-gain: must be a share, at least 0 and below 1, got '1'"),
        (["--memory-weight", "much"], "--memory-weight: must be a number, at least 0 and finite, got 'much'"),
        (["--max-classes", "0"], "--max-classes: must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fit", "-", *arguments])
    assert message in capsys.readouterr().err
