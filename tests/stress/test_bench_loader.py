"""`arenax bench loader`: its samples, its counters, its turns with loaders that need no workers, and end to end."""

import importlib.util
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import jax.numpy as jnp
import numpy as np
import pytest

from arenax_stress import _bench_loader, _bench_loader_cost, _bench_loader_forms, _bench_loader_tables, cli
from arenax_stress._bench_clock import MIN_ROUNDS, Clock
from arenax_stress._bench_loader_cost import SharedFiles, Usage
from arenax_stress._bench_loader_forms import Case, Loader, cases_of
from arenax_stress._bench_loader_samples import CLASSES, ROWS, Samples, Tokens, numpy_collate, pad_in_slot, pad_numpy
from arenax_stress._bench_loader_turns import VERIFIED, Plan, Turn, checksum, measure_turns

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


# ------------------------------------------------------------------------------------------------------------- samples


def test_a_worker_that_imports_the_samples_does_not_import_jax():
    check = "import sys, arenax_stress._bench_loader_samples; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


@pytest.mark.parametrize("dataset", [Samples(100, columns=8, leaves=3), Tokens(1000)])
def test_samples_are_the_same_in_every_process(dataset):
    first = dataset[7]
    sent = pickle.loads(pickle.dumps(type(dataset)(**{k: v for k, v in vars(dataset).items() if k[0] != "_"})))
    assert len(sent) == len(dataset)
    assert sent[7].keys() == first.keys()
    assert first["index"] == 7
    for key, value in first.items():
        assert np.array_equal(sent[7][key], value)
        assert key == "index" or not np.array_equal(value, dataset[8][key])


def test_ragged_batches_have_every_class_and_zeros_for_padding():
    tokens = Tokens(ROWS * 8)
    capacities = set()
    for start in range(0, len(tokens), ROWS):
        samples = [tokens[i] for i in range(start, start + ROWS)]
        batch = pad_numpy(samples)
        assert checksum(pad_in_slot(samples)) == checksum(batch)
        capacities.add(batch["tokens"].shape[1])
        for row, sample in zip(batch["tokens"], samples, strict=True):
            length = sample["length"]
            assert np.array_equal(row[:length], sample["tokens"])
            assert not row[length:].any()
    assert capacities == set(CLASSES)


def test_tensors_are_padded_as_arrays_are():
    pytest.importorskip("torch")
    samples = [Tokens(ROWS)[i] for i in range(4)]
    batch = _bench_loader_forms.pad_tensors(samples)
    assert checksum({key: tensor.numpy() for key, tensor in batch.items()}) == checksum(pad_numpy(samples))


def test_checksums_tell_values_names_shapes_and_dtypes_apart():
    batch = numpy_collate([Samples(4, columns=2)[i] for i in range(4)])
    x, index = batch["x0"], batch["index"]
    others = [
        {"x0": x, "index": index[::-1]},
        {"x0": x[::-1], "index": index},
        {"x0": x.reshape(2, 4), "index": index},
        {"x0": x.view(np.int32), "index": index},
        {"x1": x, "index": index},
        {"index": index},
    ]
    assert checksum({"index": jnp.asarray(index), "x0": jnp.asarray(x)}) == checksum(batch)
    assert len({checksum(other) for other in [batch, *others]}) == 7


# --------------------------------------------------------------------------------------------------------------- costs


def test_usage_is_that_of_the_process():
    before = _bench_loader_cost.own_usage()
    touched = bytearray(32 * 2**20)
    used = _bench_loader_cost.own_usage() - before
    assert used.faults > 0
    assert used.cpu_seconds >= 0
    del touched


@linux
def test_processes_are_told_in_proc_and_those_that_are_gone_are_not():
    here = [os.getpid()]
    usage, own = _bench_loader_cost.usage_of(here), _bench_loader_cost.own_usage()
    assert usage.faults == pytest.approx(own.faults, rel=0.1)
    assert usage.cpu_seconds == pytest.approx(own.cpu_seconds, rel=0.1, abs=0.1)
    assert _bench_loader_cost.resident_bytes(here * 2) > _bench_loader_cost.resident_bytes(here) > 2**20
    assert _bench_loader_cost.usage_of([]) == Usage(0, 0)
    gone = [*here, 2**22 + 1]
    assert _bench_loader_cost.usage_of(gone) is None
    assert _bench_loader_cost.resident_bytes(gone) is None


@linux
def test_descriptors_are_counted():
    before = _bench_loader_cost.descriptors()
    with open(os.devnull):
        assert _bench_loader_cost.descriptors() == before + 1


@linux
def test_shared_files_are_counted_though_they_are_gone_and_semaphores_are_not():
    files = SharedFiles()
    for _ in range(3):
        memory = SharedMemory(create=True, size=100)
        memory.close()
        memory.unlink()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    # Any process may create some meanwhile.
    assert 3 <= files.count() < 1000
    del semaphore
    files.close()
    files.close()
    assert files.count() is None


def test_a_system_that_tells_nothing_leaves_the_figures_out(monkeypatch):
    monkeypatch.setattr(_bench_loader_cost.ctypes, "CDLL", lambda name: object())
    files = SharedFiles()
    assert files.count() is None
    files.close()
    _bench_loader_cost.give_back_memory()


# --------------------------------------------------------------------------------------------------------------- turns


def in_process(name="", order=None, shift=0, pooled=False):
    """A loader without workers; `order` is told of each batch and of the end."""

    def batches(case, samples, workers, pool):
        try:
            for start in range(shift, len(samples) - ROWS, ROWS):
                if order is not None:
                    order.append((name, start // ROWS))
                batch = numpy_collate([samples[i] for i in range(start, start + ROWS)])
                yield {key: jnp.asarray(value) for key, value in batch.items()}
        finally:
            if order is not None:
                order.append((name, "end"))

    return Loader("x", batches, pooled)


def small(**fields):
    return Case("small", 128, lambda n: Samples(n, columns=1), **fields)


def plan_of(rounds, batches):
    return Plan(rounds, batches, workers=1, library="torch")


def test_loaders_take_turns_and_none_always_follows_the_same_other():
    order = []
    plan = plan_of(rounds=2, batches=5)
    loaders = {name: in_process(name, order) for name in "abc"}
    runners = measure_turns(Clock(), loaders, small(), plan)
    before, turn = plan.untimed, plan.untimed + 5
    names = [name for name, n in order if n != "end"]
    assert names == [x for x in "abc" for _ in range(before)] + [x for x in "abccba" for _ in range(turn)]
    assert {name for name, n in order if n == "end"} == set("abc")
    for runner in runners.values():
        assert len(runner.turns) == 2
        assert len(runner.sums) == before + 2 * turn <= plan.batch_count
        assert all(turn.seconds > 0 for turn in runner.turns)
    assert _bench_loader.differences(runners, "here") == []


def test_batches_are_compared_byte_by_byte_before_each_turn_and_by_their_order_in_it():
    runners = measure_turns(Clock(), {"default": in_process(), "late": in_process(shift=ROWS)}, small(), plan_of(1, 2))
    assert _bench_loader.differences(runners, "8 B, x") == ["late gave other batches than default at 8 B, x"]
    sums = runners["default"].sums
    assert len(set(sums)) == len(sums) > 2 * VERIFIED


def test_turns_end_with_the_budget_but_not_before_three_rounds():
    clock = Clock(deadline=0.0)
    runners = measure_turns(clock, {"default": in_process()}, small(), plan_of(rounds=9, batches=1))
    assert len(runners["default"].turns) == MIN_ROUNDS


def test_a_step_counts_as_time_of_the_batch():
    plan = plan_of(1, 2)
    assert measure_turns(Clock(), {"x": in_process()}, small(step_seconds=0.05), plan)["x"].turns[0].seconds >= 0.05


def test_gains_are_paired_by_round():
    class Rounds:
        def __init__(self, *seconds):
            self.turns = [Turn(s, Usage(0, 0), None, None) for s in seconds]

    assert _bench_loader_tables.gain(Rounds(1, 10, 2), Rounds(2, 20, 8)) == 2
    costs = _bench_loader_tables._costs(Rounds(1.0), 4)
    assert costs["workers_faults"] is costs["workers_cpu_seconds"] is costs["shared_files"] is None
    assert costs["parent_faults"] == 0


def test_cases_are_of_the_size_that_they_say():
    cases = cases_of(["plain", "ragged", "leaves", "step"], [128, 2**16])
    assert [case.name for case in cases] == ["128 B", "64 KiB", "512 KiB, 50 ms step", "ragged tokens", "12 leaves"]
    for case in cases:
        samples = [case.samples(10 * ROWS)[i] for i in range(ROWS)]
        if not case.ragged:
            leaves = numpy_collate(samples)
            assert case.batch_bytes == sum(leaf.nbytes for key, leaf in leaves.items() if key != "index")
            assert len(leaves) == (12 if case.name == "12 leaves" else 2)


# ---------------------------------------------------------------------------------------------------------- end to end


def loader(folder, capsys, *options):
    """One run: the rows of each table, the conclusions, and what was printed."""
    arguments = ["--json", str(folder / "x.json"), "--plot", str(folder / "x.png"), *map(str, options)]
    status = cli.main(["bench", "loader", *arguments])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    found = json.loads((folder / "x.json").read_text())
    assert found["command"] == "loader"
    assert not {"lacking", "refuse"} & set(found["settings"])
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for table in found["tables"].values():
        assert table["wrong"] == []
        assert " ".join(table["conclusion"].split()) in " ".join(out.split())
    return found["tables"], out


def assert_consistent(tables, library, names, cases):
    """Each case has a row of rates and one of costs for each loader, and these agree."""
    rates = [row for name in (library, f"{library}_kinds") for row in tables.get(name, {"rows": []})["rows"]]
    assert [row["case"] for row in rates] == cases
    for row in rates:
        costs = {cost["loader"]: cost for cost in tables["costs"]["rows"] if cost["case"] == row["case"]}
        assert list(costs) == names
        assert len({cost["checksums"] for cost in costs.values()}) == 1
        assert costs["default"]["over_default"] == 1
        for name, cost in costs.items():
            assert row[f"{name}_samples_per_second"] == cost["samples_per_second"] > 0
            assert row[f"{name}_seconds"] == pytest.approx(ROWS / cost["samples_per_second"])
            assert cost["rounds"] == row["rounds"] == 1
            if name in ("arenax", "adopt"):
                assert row[f"{name}_over_default"] == cost["over_default"]
                assert cost["parent_faults"] < 100
            if sys.platform == "linux":
                assert cost["workers_resident_bytes"] > 2**20
                assert cost["workers_faults"] >= 0
                assert cost["descriptor_count"] > 0
    if sys.platform == "linux":
        today = next(cost for cost in tables["costs"]["rows"] if cost["loader"] == "default")
        assert today["shared_files"] > 0


def test_torch(tmp_path, capsys):
    pytest.importorskip("torch")
    options = ["--libraries", "torch", "--rounds", 1, "--batches", 4, "--workers", 1]
    tables, _ = loader(tmp_path, capsys, *options, "--sizes", "64KiB", "--cases", "plain", "ragged")
    assert list(tables) == ["torch", "torch_kinds", "costs"]
    assert_consistent(tables, "torch", ["default", "numpy", "arenax", "adopt"], ["64 KiB", "ragged tokens"])
    assert all("arenax_over_numpy" in row for row in tables["torch"]["rows"])


def test_grain(tmp_path, capsys):
    pytest.importorskip("grain")
    options = ["--libraries", "grain", "--rounds", 1, "--batches", 2, "--workers", 1, "--quick"]
    tables, _ = loader(tmp_path, capsys, *options, "--sizes", "64KiB", "--cases", "plain", "ragged")
    assert list(tables) == ["grain", "grain_kinds", "costs"]
    assert_consistent(tables, "grain", ["default", "arenax"], ["64 KiB", "ragged tokens"])


@pytest.fixture
def in_process_loaders(monkeypatch):
    """Loaders without workers in the place of grain's and torch's."""
    loaders = {name: {"default": in_process(), "arenax": in_process(pooled=True)} for name in ("torch", "grain")}
    monkeypatch.setattr(_bench_loader_forms, "LOADERS", loaders)
    monkeypatch.setattr(_bench_loader, "described", lambda library, workers: f"{library} described")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return loaders


def test_other_batches_than_todays_are_an_error(in_process_loaders, capsys):
    in_process_loaders["grain"]["arenax"] = in_process(shift=ROWS, pooled=True)
    assert cli.main(["bench", "loader", "--cases", "plain", "--sizes", "128", "--rounds", "1", "--batches", "1"]) == 1
    out, err = capsys.readouterr()
    assert err == "arenax bench loader: arenax gave other batches than default at 128 B, grain\n"
    assert "DIFFERENT from today's." in out
    assert "torch described" in out


def test_quick_leaves_out_what_a_first_look_needs_least(in_process_loaders, tmp_path, capsys):
    tables, out = loader(tmp_path, capsys, "--quick", "--sizes", "128", "--batches", 1, "--workers", 1)
    rows = tables["costs"]["rows"]
    assert [row["name"] for row in rows if row["loader"] == "default"] == [
        "128 B, torch default",
        "128 B, grain default",
        "512 KiB, 50 ms step, torch default",
    ]
    assert {row["rounds"] for row in rows} == {3}
    assert "Where the consumer is busy for 50 ms with each batch, the pool is worth" in out


def test_it_keeps_to_its_budget_and_says_what_it_left_out(in_process_loaders, tmp_path, capsys):
    options = ["--cases", "plain", "--sizes", "128", "256", "--batches", 1, "--rounds", 9, "--seconds", "0.001"]
    tables, _ = loader(tmp_path, capsys, *options)
    assert [(row["library"], row["rounds"]) for row in tables["costs"]["rows"]] == [("torch", MIN_ROUNDS)] * 2
    assert tables["costs"]["notes"][-1] == "Out of time before 128 B, grain; 256 B, torch; 256 B, grain."
    assert list(tables) == ["torch", "costs"]


@pytest.mark.parametrize(
    ("absent", "options", "line"),
    [
        (
            {"torch", "grain"},
            [],
            'arenax bench loader needs torch or grain: pip install "arenax[torch]" or pip install "arenax[grain]"\n',
        ),
        ({"torch"}, ["--libraries", "torch"], 'arenax bench loader needs torch: pip install "arenax[torch]"\n'),
    ],
)
def test_without_a_library_it_says_what_to_install(absent, options, line, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    assert cli.main(["bench", "loader", *options]) == 1
    assert capsys.readouterr() == ("", line)


def test_a_library_that_is_not_there_is_left_out_with_a_line(in_process_loaders, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    tables, out = loader(tmp_path, capsys, "--cases", "plain", "--sizes", "128", "--rounds", 1, "--batches", 1)
    assert list(tables) == ["grain", "costs"]
    assert 'torch is not installed and left out: pip install "arenax[torch]"' in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "1000"], "argument --sizes: must be at least 128 bytes and a multiple of 128, got '1000'"),
        (["--workers", "0"], "argument --workers: must be at least 1, got 0"),
        (["--batches", "0"], "argument --batches: must be at least 1, got 0"),
        (["--cases", "all"], "argument --cases: invalid choice: 'all'"),
        (["--libraries", "jax"], "argument --libraries: invalid choice: 'jax'"),
    ],
)
def test_bad_arguments_are_said_before_anything_is_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(_bench_loader, "measure_loader", lambda *args: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "loader", *arguments])
    assert message in capsys.readouterr().err.replace("\n", " ")
