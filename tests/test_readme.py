"""README.md tells the truth: its Python blocks run, in order, as one session."""

import doctest
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_readme_blocks_run_as_printed():
    text = README.read_text(encoding="utf-8")
    blocks = [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]
    assert blocks, "README.md has no ```python block"

    session = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for line, block in blocks:
        assert ">>>" in block, f"README.md:{line}: a ```python block without >>> is not tested"
        test = doctest.DocTestParser().get_doctest(block, {}, "README.md", str(README), line)
        test.globs = session  # shared; given to get_doctest it would be copied
        runner.run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
