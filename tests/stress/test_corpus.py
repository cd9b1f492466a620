"""The demo's text: real, ragged, heavy-tailed, and the same for the same seed."""

import statistics

import pytest

from arenax_stress import _corpus


@pytest.fixture(scope="module")
def batches():
    return _corpus.batches(150, 8, seed=0)


def test_the_same_for_a_seed_and_other_for_another(batches):
    assert _corpus.batches(150, 8, seed=0) == batches
    assert _corpus.batches(150, 8, seed=1) != batches


def test_as_many_batches_as_asked():
    for steps in (1, 7, _corpus.WINDOW, 2 * _corpus.WINDOW + 1):
        batches = _corpus.batches(steps, 4, seed=3)
        assert [len(batch) for batch in batches] == [4] * steps


def test_lengths_are_bounded_and_heavy_tailed(batches):
    lengths = [len(text) for batch in batches for text in batch]
    assert min(lengths) > 0
    assert max(lengths) <= _corpus.MAX_LENGTH
    median, mean = statistics.median(lengths), statistics.mean(lengths)
    assert mean > 1.1 * median  # Skewed, although the cut takes the far tail.
    assert statistics.quantiles(lengths, n=20)[-1] > 2.5 * median


def test_nearly_every_batch_has_a_length_of_its_own(batches):
    assert len({max(map(len, batch)) for batch in batches}) > 100


def test_batches_are_of_similar_length(batches):
    padded = sum(max(map(len, batch)) * len(batch) for batch in batches)
    assert sum(len(text) for batch in batches for text in batch) > 0.8 * padded


def test_texts_are_whole_functions_or_cut_at_a_line(batches):
    for batch in batches:
        for text in batch:
            assert text.startswith((b"def ", b"async def ")), text
            assert len(text) > _corpus.MAX_LENGTH // 2 or compile(text, "text", "exec", dont_inherit=True)


def test_no_function_comes_twice_before_all_have_come(monkeypatch, tmp_path):
    (tmp_path / "module.py").write_text("".join(f"def f{i}(): pass\n" for i in range(10)))
    monkeypatch.setattr(_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    drawn = _corpus.sample(25, seed=0)
    assert len(set(drawn[:10])) == len(set(drawn[10:20])) == 10
    assert drawn[:10] != drawn[10:20]


def test_a_library_without_source_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no Python source in"):
        _corpus.sample(1, seed=0)


def test_methods_are_dedented_inner_functions_stay_inside_and_encodings_are_honoured(tmp_path):
    method = "    def f(self):\n        def g(): return 'é'\n        return g\n"
    source = f"# coding: latin-1\n\f\nclass A:\n{method}async def h(): pass\n"
    (tmp_path / "module.py").write_bytes(source.encode("latin-1"))
    assert [*_corpus.functions(tmp_path / "module.py")] == [
        "def f(self):\n    def g(): return 'é'\n    return g".encode(),
        b"async def h(): pass",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"x" * 1024, b"x" * 1024),
        (b"x" * 1025, b"x" * 1024),
        (b"a\n" + b"x" * 1024, b"a\n"),
        (b"x" * 1023 + b"\n" + b"y", b"x" * 1023 + b"\n"),
    ],
)
def test_cut(text, expected):
    assert _corpus.cut(text) == expected
