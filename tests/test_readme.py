"""README.md tells the truth: its Python blocks run, in order, as one session."""

import doctest
import importlib.util
import re
from pathlib import Path

import jax
import pytest

README = Path(__file__).parents[1] / "README.md"
# "```python needs torch" is run where torch is installed.
BLOCK = re.compile(r"^```python(?: needs (\w+))?\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_readme_blocks_run_as_printed():
    text = README.read_text(encoding="utf-8")
    found = [(text.count("\n", 0, match.start(2)), match[1], match[2]) for match in BLOCK.finditer(text)]
    assert len(found) == text.count("\n```python"), "README.md has a ```python block of another form"
    blocks = [(line, block) for line, needs, block in found if not needs or importlib.util.find_spec(needs)]

    jax.clear_caches()  # The figures count compiles, also those that an earlier test may have spared.
    session = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for line, block in blocks:
        assert ">>>" in block, f"README.md:{line}: a ```python block without >>> is not tested"
        test = doctest.DocTestParser().get_doctest(block, {}, "README.md", str(README), line)
        test.globs = session  # shared; given to get_doctest it would be copied
        runner.run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
