"""What the package promises to whoever installs it: few dependencies, a light import, nothing of our machines."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_exactly_four_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in project["dependencies"]]
    assert sorted(names) == ["attrs", "jax", "jaxlib", "numpy"]


def test_import_is_light(tmp_path):
    program = """
import json, sys
import arenax
from jax._src import xla_bridge
heavy = {"rich", "matplotlib", "torch", "grain", "hypothesis", "pytest"} & set(sys.modules)
print(json.dumps({"heavy": sorted(heavy), "backends": sorted(xla_bridge._backends)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )
    assert json.loads(done.stdout) == {"heavy": [], "backends": []}


def test_no_file_names_a_machine_or_a_registry():
    # Spelt so that this file does not find itself.
    forbidden = re.compile(r"(?<![\w.~-])/(?:work|root)/|pypi[.]org|pythonhosted[.]|registry[.]npmjs|index-url[ =]http")
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in filter(None, listing.split("\0"))
        if (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []
