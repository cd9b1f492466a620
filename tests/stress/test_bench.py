"""`arenax bench`: each benchmark end to end with tiny sizes, its clock with a fake one, and what it refuses."""

import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax_stress import (
    _bench,
    _bench_device,
    _bench_forms,
    _bench_lease,
    _bench_put,
    _bench_report,
    _bench_write,
    cli,
)
from arenax_stress._bench_clock import MIN_ROUNDS, WARM_UP, Clock, calls_for, minor_faults, rounds_for
from arenax_stress._bench_table import Column, Plot, Table, ratio, share_text, size_text, time_text, verdict


class FakeTime:
    """Time that goes on only where a form says so."""

    def __init__(self):
        self.now, self.faults = 100.0, 0

    def clock(self, **fields):
        return Clock(timer=lambda: self.now, faults=lambda: self.faults, **fields)

    def spend(self, *seconds, faults=0):
        """A form whose calls take these seconds, one after another and over again."""
        turns = itertools.cycle(seconds)

        def form():
            self.now += next(turns)
            self.faults += faults

        return form


# ------------------------------------------------------------------------------------------------------------ the clock


def test_clock_takes_the_median_and_leaves_the_first_rounds_out():
    time = FakeTime()
    slow_at_first = iter([50.0] * WARM_UP + [1.0, 2.0, 9.0])
    form = lambda: time.spend(next(slow_at_first))()  # noqa: E731
    timing = time.clock().measure({"form": form}, rounds=3)["form"]
    assert (timing.seconds, timing.rounds, timing.calls) == (pytest.approx(2.0), 3, 1)


def test_clock_divides_blocks_and_faults_by_their_calls():
    time = FakeTime()
    forms = {"block": time.spend(0.5, faults=3), "single": time.spend(4.0, faults=7)}
    timings = time.clock().measure(forms, rounds=4, calls={"block": 20, "single": 1})
    assert timings["block"].seconds == pytest.approx(0.5)
    assert timings["block"].faults == 3
    assert timings["block"].calls == 20
    assert timings["single"].seconds == pytest.approx(4.0)
    assert timings["single"].faults == 7


def test_forms_take_turns_and_none_always_follows_the_same_other():
    order = []
    forms = {name: lambda name=name: order.append(name) for name in "abc"}
    assert list(FakeTime().clock().measure(forms, rounds=2)) == ["a", "b", "c"]
    assert "".join(order) == "abccba" * ((WARM_UP + 2) // 2)


def test_clock_stops_at_its_budget_but_not_before_three_rounds():
    time = FakeTime()
    clock = time.clock(deadline=time.now + 20)
    assert clock.measure({"form": time.spend(1.0)}, rounds=100)["form"].rounds == 20 - WARM_UP
    assert clock.over
    assert clock.measure({"form": time.spend(1.0)}, rounds=100)["form"].rounds == MIN_ROUNDS
    assert clock.measure({"form": time.spend(1.0)}, rounds=1)["form"].rounds == 1


def test_shares_of_the_budget_nest_and_are_given_back():
    time = FakeTime()
    clock = time.clock(deadline=200.0)
    with clock.share(0.5):
        assert clock.deadline == 150.0
        with clock.share(0.1):
            assert clock.deadline == 105.0
        time.now = 170.0
        assert clock.over
        with clock.share(1.0):
            assert clock.over
    assert (clock.deadline, clock.over) == (200.0, False)
    with time.clock().share(0.5) as nothing:
        assert nothing is None


def test_clock_reports_progress():
    seen = []
    time = FakeTime()
    clock = time.clock(progress=lambda *args: seen.append(args))
    clock.measure({"form": time.spend(1.0)}, rounds=2, what="this")
    assert seen == [("this", 0, 2)] * WARM_UP + [("this", 1, 2), ("this", 2, 2)]


def test_small_sizes_come_in_blocks_and_large_ones_in_few_rounds():
    assert calls_for(64 * 2**10) > calls_for(64 * 2**10 + 4) == 1
    assert rounds_for(2**20, None) > rounds_for(2**28, None) >= MIN_ROUNDS
    assert rounds_for(2**20, None, quick=True) < rounds_for(2**20, None)
    assert rounds_for(2**28, 7) == rounds_for(4, 7, quick=True) == 7


def test_page_faults_count_touched_pages():
    before = minor_faults()
    touched = bytearray(32 * 2**20)
    assert minor_faults() > before
    del touched


# ---------------------------------------------------------------------------------------------------- forms and figures


def test_sources_lie_where_jax_copies():
    for nbytes in (4, 4096, 4100, 2**20):
        value = _bench_forms.ordinary(nbytes)
        assert value.nbytes == nbytes
        assert value.ctypes.data % 64 == 16
        assert len(np.unique(value)) > 0.9 * value.size
    assert not np.array_equal(_bench_forms.ordinary(4096), _bench_forms.ordinary(4096, seed=1))


def test_a_form_that_brings_anything_else_is_named():
    value = _bench_forms.ordinary(4096)
    forms = {
        "right": lambda see: see(jnp.array(value)),
        "wrong": lambda see: see(jnp.array(value).at[0, 0].add(1)),
        "less": lambda see: see(()),
    }
    assert _bench_forms.verified(forms, value, "4 KiB") == [
        "wrong brought wrong values at 4 KiB",
        "less brought wrong values at 4 KiB",
    ]


def test_every_form_is_verified_and_every_ref_write_is_in_place():
    value = _bench_forms.ordinary(64 * 2**10)
    with arenax.BufferPool() as pool:
        forms = _bench_forms.landing_forms({"x": value}, pool)
        assert _bench_forms.verified(forms, value, "") == []
        for form in _bench_forms.timed(forms).values():
            form()
        assert pool.stats().slot_count == 1
    ref = _bench_forms.ref_form(value)
    assert _bench_forms.verified({"new_ref": ref, "array": _bench_forms.array_form(value)}, value, "") == []
    value[:] = 3
    assert _bench_forms.verified({"new_ref": ref}, value, "") == []


def test_a_jax_without_references_leaves_the_column_empty_and_says_so(monkeypatch):
    monkeypatch.setattr(_bench_forms, "REF", None)
    monkeypatch.setattr(_bench_put, "REF", None)
    table = _bench_put.measure_put(Clock(), [4096], rounds=1)
    assert table.rows[0]["new_ref_seconds"] is None
    assert table.rows[0]["new_ref_over_step"] is None
    assert _bench_forms.NO_REF in table.notes
    assert "new_ref" not in table.conclusion


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([2.0, 4.0], "P is faster than R at all of them (2 to 4×)."),
        ([2.0, 1.0], "P is faster than R at 0 (2×); about equal at 1."),
        ([0.5], "P is SLOWER than R at 0 (takes 2× as long)."),
        ([2.0, 0.5, 0.25], "P is faster than R at 0 (2×); SLOWER at 1, 2 (takes 2 to 4× as long)."),
        ([1.01, 0.5], "P is about equal to R at 0; SLOWER at 1 (takes 2× as long)."),
        ([1.3] * 4 + [1.0], "P is faster than R at 4 of 5 (1.3×); about equal at 4."),
        ([None], "Nothing was measured of P against R."),
    ],
)
def test_conclusions_say_where_it_is_slower(ratios, said):
    rows = [{"n": i, "r": r} for i, r in enumerate(ratios)]
    assert verdict("P", "R", rows, "r", lambda row: str(row["n"])) == said


def test_lease_conclusions_say_when_the_cost_depends_on_the_size():
    def rows(*costs):
        return [
            {"slot_bytes": 2**20 * (i + 1), "write_seconds": c, "undonated_over_beside": 8.0}
            for i, c in enumerate(costs)
        ]

    said = _bench_write._write_conclusion(rows(1e-5, 1.2e-5))
    assert "A write took 10 µs to 12 µs, whatever the slot's size." in said
    assert "lease.write is faster than an update without donation at all of them (8×)." in said
    assert "it DEPENDS on the slot's size" in _bench_write._write_conclusion(rows(1e-5, 9e-5))

    def checkouts(many):
        return [{"device": "fake:0", "slot_count": n, "lease_over_few_slots": r} for n, r in ((10, 1.0), (1000, many))]

    assert "DEPENDS" not in _bench_lease._checkout_conclusion(checkouts(1.1))
    assert "DEPENDS" in _bench_lease._checkout_conclusion(checkouts(3.0))


def test_figures_are_printed_with_their_units():
    assert [time_text(s) for s in (3.2e-8, 1.5e-6, 0.0123, 61.0)] == ["32 ns", "1.5 µs", "12.3 ms", "61 s"]
    assert [size_text(n) for n in (12, 4096, -(2**20), 3 * 2**30)] == ["12 B", "4 KiB", "-1 MiB", "3 GiB"]
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(3.0, None), ratio(3.0, 0.0)) == (1.5, None, None, None)
    assert [share_text(x) for x in (-0.001, 0.255, 1.0)] == ["0%", "26%", "100%"]
    row = {"a": 0.5, "b": None}
    assert [Column(key, "", "seconds").cell(row) for key in ("a", "b", "c")] == ["500 ms", "–", "–"]


def test_a_narrow_terminal_gets_the_columns_in_parts_and_never_broken():
    columns = [Column(key, f"{key * 3}\n{key * 9}", "seconds") for key in "nabc"]
    table = Table("x", "X", columns, [{"n": 1e-6, "a": 0.5}], "")

    def keys(width):
        return ["".join(column.key for column in part) for part in _bench_report.fitting(table, width)]

    assert keys(44) == ["nabc"]
    assert keys(43) == keys(33) == ["nab", "nc"]
    assert keys(32) == keys(22) == ["na", "nb", "nc"]
    assert keys(5) == ["na", "nb", "nc"]
    assert _bench_report.fitting(Table("x", "X", columns, [], ""), 80) == []


def test_a_chart_of_nothing_is_still_a_picture(tmp_path):
    table = Table("x", "X", (), [{"n": 1, "s": 0.5}], "", plot=None)
    drawn = Table("y", "Y", (), [{"n": 1, "s": None}, {"n": 2, "s": 0.5}], "", plot=Plot("n", "n", "count", {"s": "s"}))
    for name, tables in (("none.svg", [table]), ("one.pdf", [table, drawn])):
        _bench_report.draw(tables, tmp_path / name, "here")
        assert (tmp_path / name).stat().st_size > 1000


def test_crew_hands_on_what_goes_wrong_in_a_thread():
    with arenax.BufferPool(_bench_lease.FakeDevice(), on_exhausted="raise") as pool:
        crew = _bench_lease.Crew(2, pool)
        try:
            with pytest.raises(arenax.PoolExhausted):
                crew.turn()
        finally:
            crew.stop()
        assert not any(thread.is_alive() for thread in crew.threads)


# ----------------------------------------------------------------------------------------------------------- end to end


def bench(folder, capsys, name, *options):
    """One benchmark: its JSON, its tables' rows, what it printed."""
    status = cli.main(
        ["bench", name, "--json", str(folder / "x.json"), "--plot", str(folder / "x.png"), *map(str, options)]
    )
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    found = json.loads((folder / "x.json").read_text())
    assert found["command"] == name
    assert set(found) == {"command", "environment", "settings", "tables", "seconds"}
    assert {"arenax", "jax", "jaxlib", "numpy", "python", "device_kind", "cpu_count", "page_bytes"} <= set(
        found["environment"]
    )
    for table in found["tables"].values():
        assert set(table) == {"title", "rows", "conclusion", "notes", "wrong"}
        assert table["wrong"] == []
        assert " ".join(table["conclusion"].split()) in " ".join(out.split())
    assert found["environment"]["device_kind"] in out
    image = (folder / "x.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000
    return SimpleNamespace(found=found, rows={k: t["rows"] for k, t in found["tables"].items()}, out=out)


def assert_quotients(rows, *names):
    """Each `a_over_b` of these is the quotient of the seconds."""
    for row in rows:
        for name in names:
            over, under = re.fullmatch(r"(\w+)_over_(\w+)", name).groups()
            assert row[name] == pytest.approx(row[f"{over}_seconds"] / row[f"{under}_seconds"]), name


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def test_put(tmp_path, capsys):
    done = bench(tmp_path, capsys, "put", "--sizes", "4KiB", "1000", "256KiB", "1GiB", "--max", "1MiB", "--rounds", 3)
    rows = done.rows["put"]
    assert done.found["settings"]["sizes"] == [row["size_bytes"] for row in rows] == [1000, 4096, 256 * 1024]
    assert all(row["rounds"] == 3 for row in rows)
    for row in rows:
        for form in _bench_put.FORMS:
            assert row[f"{form}_seconds"] > 0, form
            assert row[f"{form}_faults"] >= 0, form
    assert_quotients(rows, "device_put_over_put", "device_put_over_step", "put_over_memcpy", "device_put_over_ring")
    assert_quotients(rows, "new_ref_over_put", "new_ref_over_step")
    assert "256 KiB" in done.out


def test_lease(tmp_path, capsys):
    done = bench(tmp_path, capsys, "lease", "--sizes", "4KiB", "2MiB", "--slots", 50, "--threads", 1, 3, "--rounds", 3)
    rows = done.rows["checkout"]
    assert [(row["slot_count"], row["held_count"]) for row in rows] == [
        (10, 0), (50, 0), (10, 0), (10, 9), (50, 49), (10, 9)
    ]  # fmt: skip
    for few, many, real in (rows[:3], rows[3:]):
        assert many["lease_over_few_slots"] == pytest.approx(many["lease_seconds"] / few["lease_seconds"])
        assert few["lease_over_few_slots"] == 1
        assert (few["device"], real["device"]) == ("fake:0", "cpu:0")
    one, three = done.rows["threads"]
    assert (one["thread_count"], three["thread_count"]) == (1, 3)
    assert three["operations_per_second"] == pytest.approx(1 / three["operation_seconds"])
    assert three["throughput_over_first"] == pytest.approx(one["operation_seconds"] / three["operation_seconds"])
    writes = done.rows["write"]
    assert [row["slot_bytes"] for row in writes] == [4096, 2 * 2**20]
    assert_quotients(writes, "undonated_over_beside")
    assert writes[1]["write_over_smallest"] == pytest.approx(writes[1]["write_seconds"] / writes[0]["write_seconds"])


def test_tree(tmp_path, capsys):
    done = bench(tmp_path, capsys, "tree", "--leaves", 1, 5, "--leaf", "1KiB", "--rounds", 3)
    rows = done.rows["tree"]
    assert [(row["leaf_count"], row["leaf_bytes"]) for row in rows] == [(1, 1024), (5, 1024)]
    assert_quotients(rows, "device_put_over_put", "device_put_over_step")
    assert rows[1]["put_seconds_per_leaf"] == pytest.approx(rows[1]["put_seconds"] / 5)


def test_sharded(tmp_path, capsys):
    done = bench(tmp_path, capsys, "sharded", "--sizes", "1KiB", "64KiB", "--rounds", 3)
    rows = done.rows["sharded"]
    assert [row["size_bytes"] for row in rows] == [1024, 64 * 1024]
    assert_quotients(rows, "device_put_over_put", "device_put_over_step")
    assert "8 devices" in done.out


def test_device(tmp_path, capsys):
    options = ["--sizes", "4KiB", "128KiB", "--ring", "128KiB", "--chunks", "16KiB", "64KiB"]
    done = bench(tmp_path, capsys, "device", *options, "--steps", 150, "--rounds", 3, "--seconds", 100)
    assert list(done.rows) == ["put", "chunks", "pinned", "overlap", "addresses", "memory"]
    assert [row["chunk_bytes"] for row in done.rows["chunks"]] == [16 * 1024, 64 * 1024]
    assert {row["placing"] for row in done.rows["chunks"]} <= {"fused", "split"}
    assert_quotients(done.rows["chunks"], "device_put_over_put")
    for row in done.rows["chunks"]:
        assert row["put_bytes_per_second"] == pytest.approx(row["size_bytes"] / row["put_seconds"])
    assert [row["size_bytes"] for row in done.rows["pinned"]] == [4096, 128 * 1024]
    assert_quotients(done.rows["pinned"], "pageable_over_pinned")
    for row in done.rows["overlap"]:
        compute, landing, both = (row[f"{key}_seconds"] for key in ("compute", "landing", "both"))
        assert row["both_over_sum"] == pytest.approx(both / (compute + landing))
        assert row["overlap"] == pytest.approx((compute + landing - both) / min(compute, landing))
    (addresses,) = done.rows["addresses"]
    assert addresses["step_count"] == addresses["planned_step_count"] == 150
    assert addresses["address_count"] == addresses["slot_count"] == 3
    assert addresses["creation_count"] == addresses["copy_count"] == addresses["spill_count"] == 0
    assert done.rows["memory"] == []
    assert "memory_stats() is None on this device" in done.out


def test_a_device_without_pinned_memory_is_said_to_have_none(monkeypatch):
    monkeypatch.setattr(_bench_device, "memory_kinds", lambda device: {"device"})
    plan = _bench_device.Plan(sizes=[4096], chunks=[1024], ring_bytes=4096, steps=1)
    for measure in (_bench_device.measure_chunks, _bench_device.measure_pinned):
        table = measure(Clock(), plan)
        assert not table.rows
        assert "no pinned_host memory" in table.notes[0]


def test_device_keeps_to_its_budget_and_says_what_it_left_out(tmp_path, capsys):
    options = ["--sizes", "4KiB", "8KiB", "16KiB", "--ring", "16KiB", "--chunks", "4KiB", "--steps", 10**9]
    done = bench(tmp_path, capsys, "device", *options, "--seconds", "0.001")
    tables = done.found["tables"]
    assert [len(tables[name]["rows"]) for name in ("put", "pinned")] == [1, 1]
    assert tables["put"]["notes"][-1] == tables["pinned"]["notes"][-1] == "Out of time before 8 KiB, 16 KiB."
    assert tables["put"]["rows"][0]["rounds"] == MIN_ROUNDS
    assert tables["addresses"]["notes"] == ["Out of time after 100 of 1,000,000,000 steps."]


def test_memory_that_a_device_reports_is_compared():
    before, after = {"bytes_in_use": 2**20}, {"bytes_in_use": 2**21, "num_allocs": 7}
    table = _bench_device.memory_table(before, after)
    assert [(row["figure"], row["change"]) for row in table.rows] == [("bytes_in_use", 2**20), ("num_allocs", 7)]
    assert "1 MiB more are in use" in table.conclusion


def test_a_pool_that_moves_its_buffers_is_found_out(monkeypatch):
    held = []
    wait = jax.block_until_ready  # The pool's own too.

    def hold(x):
        if isinstance(x, dict):
            held.append(np.asarray(x["x"]))
        return wait(x)

    monkeypatch.setattr(jax, "block_until_ready", hold)
    table = _bench_device.measure_addresses(Clock(), 10)
    assert table.wrong
    assert "the pool was not steady in step" in table.wrong[0]
    assert "did NOT hold still" in table.conclusion


def test_wrong_values_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(_bench_forms.np, "array_equal", lambda a, b: False)
    assert cli.main(["bench", "tree", "--leaves", "1", "--rounds", "1"]) == 1
    assert "arenax bench tree: put brought wrong values at 1 leaves\n" in capsys.readouterr().err


def test_quick_leaves_large_sizes_out_unless_they_are_asked_for():
    def sizes(**given):
        args = SimpleNamespace(quick=True, sizes=None, default_sizes=_bench.SIZES, quick_max=_bench.QUICK_MAX)
        vars(args).update(given)
        return _bench._chosen_sizes(args)

    assert _bench.SIZES[0] == 4096
    assert _bench.SIZES[-1] == 256 * 2**20
    assert max(sizes()) == _bench.QUICK_MAX
    assert sizes(quick=False) == _bench.SIZES
    assert max(sizes(max=16 * 2**20)) == 16 * 2**20
    assert sizes(sizes=[2**30, 2**30]) == [2**30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: BENCH"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["put", "--sizes", "many"], "argument --sizes: must be a size such as 4096, 64KiB or 1MiB, got 'many'"),
        (["put", "--sizes", "6"], "argument --sizes: must be at least 4 bytes and a multiple of 4, got '6'"),
        (["put", "--max", "1KiB"], "argument --max: leaves none of the sizes, the least of which is 4096 bytes"),
        (["put", "--rounds", "0"], "argument --rounds: must be at least 1, got 0"),
        (["put", "--seconds", "nan"], "argument --seconds: must be above 0 and finite, got nan"),
        (["put", "--seconds", "soon"], "argument --seconds: must be a number of seconds, got 'soon'"),
        (["lease", "--sizes", "1KiB"], "argument --sizes: must be at least 4096 bytes and a multiple of 4"),
        (["lease", "--threads", "0"], "argument --threads: must be at least 1, got 0"),
        (["lease", "--slots", "9"], "argument --slots: must be at least 10, got 9"),
        (["tree", "--leaves", "x"], "argument --leaves: must be an integer, got 'x'"),
        (["device", "--json", "x.txt"], "argument --json: must end with .json, got 'x.txt'"),
        (["device", "--plot", "x.gif"], "argument --plot: must end with .png or .svg or .pdf, got 'x.gif'"),
        (["tree", "--json", "no/such/x.json"], "argument --json: must be a file that can be written: No such file"),
        (["tree", "--plot", "/proc/x.png"], "argument --plot: must be a file that can be written"),
    ],
)
def test_bad_arguments_are_said_before_anything_is_measured(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Clock, "measure", lambda *args, **fields: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    with pytest.raises(SystemExit):
        cli.main(["bench", "tree", "--json", str(old), "--plot", "x.gif"])
    with pytest.raises(SystemExit):
        cli.main(["bench", "tree", "--json", str(new), "--plot", "x.gif"])
    assert old.read_text() == "kept"
    assert not new.exists()
