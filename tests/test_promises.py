"""docs/promises.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 30
    assert len({*NAMED}) == len(NAMED)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)
