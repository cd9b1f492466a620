"""The frame of the `arenax` command: help, bad arguments, missing extras, all without a traceback."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from arenax_stress import _demo, cli


def test_module_and_command_are_the_same(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "arenax_stress", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0
    assert done.stdout.startswith("arenax ")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["--nothing"]])
def test_bad_command(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: arenax" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert all(command in said for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--steps", "many"], "argument --steps: must be an integer, got 'many'"),
        (["--seed", "-1"], "argument --seed: must be at least 0, got -1"),
        (["--png", "picture.gif"], "argument --png: must end with .png, got 'picture.gif'"),
        (["--png", "no/such/folder/x.png"], "argument --png: must be a file that can be written: No such file"),
        (["--json", "x.txt"], "argument --json: must end with .json, got 'x.txt'"),
    ],
)
def test_bad_arguments_of_the_demo_are_said_before_anything_starts(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(_demo, "run", lambda args: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", *arguments])
    assert message in capsys.readouterr().err


def test_missing_extras_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == 'arenax demo needs rich and matplotlib and sortedcontainers: pip install "arenax[tools]"\n'


def test_only_the_module_asked_for_is_imported(monkeypatch):
    def module_named(name, package):
        assert (name, package) == ("._demo", "arenax_stress")
        return SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: 7)

    monkeypatch.setattr(importlib, "import_module", module_named)
    assert cli.main(["demo"]) == 7


def test_interrupt_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "run", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "arenax demo: interrupted\n"
