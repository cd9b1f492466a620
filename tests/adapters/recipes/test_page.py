"""docs/recipes.md holds nothing that no test runs, and no recipe that takes long to read."""

from pathlib import Path

from tests.adapters.recipes import PAGE, SHARED, blocks


def test_each_block_is_run_by_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for heading in blocks():
        assert heading == SHARED or f'run_recipe("{heading}")' in tests
    assert PAGE.read_text(encoding="utf-8").count("```python") == len(blocks())


def test_recipes_are_short():
    for heading, (line, code) in blocks().items():
        assert sum(bool(text) for text in code.splitlines()) <= 25, heading
        assert all(len(text) <= 120 for text in code.splitlines()), f"line {line}"
