"""The soak runs clean on a pool that is right, and each of its detectors goes off on one that is broken."""

import argparse
import json
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax._arena import Arena
from arenax._donation import DonatedLanding
from arenax._host_write import HostWrite, memory_of
from arenax_stress import _soak, _soak_holder, _soak_steps, _stress_command
from arenax_stress._soak import MODES, Report, soak
from arenax_stress._soak_faults import Injected
from arenax_stress._soak_steps import Endurance, endure

Patch = pytest.MonkeyPatch


def every(n: int, broken: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is right but every n-th time."""
    calls = iter(range(1 << 60))
    return lambda *args: (broken if next(calls) % n == n - 1 else right)(*args)


def find(mode: str = "grow", seeds: int = 6, **options: Any) -> str:
    """Soaks until a failure is found, and returns its text; one seed may miss what is broken."""
    for seed in range(seeds):
        report = soak(
            **({"seconds": 20, "operations": 200, "threads": 1, "classes": 3} | options), seed=seed, modes=[mode]
        )
        if report.failures:
            assert report.exit_status == 1
            return "\n".join(map(str, report.failures))
    pytest.fail("the soak did not notice")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_short_soak_is_clean(mode: str, threads: int):
    report = soak(seconds=2.5, seed=10 * MODES.index(mode) + threads, threads=threads, classes=3, modes=[mode])
    assert report.failures == []
    assert report.exit_status == 0
    assert report.verified_count > 0


def test_all_modes_in_one_run():
    report = soak(seconds=4, seed=5, threads=2, classes=2)
    assert report.failures == []
    assert [*report.stats] == [*MODES]


def test_operations_depend_on_seed_thread_and_number_alone():
    runs = [soak(seconds=60, seed=3, threads=1, classes=2, operations=40, modes=["grow"]) for _ in range(2)]
    assert runs[0].done_count == runs[1].done_count
    assert runs[0].verified_bytes == runs[1].verified_bytes
    assert (
        runs[0].done_count != soak(seconds=60, seed=4, threads=1, classes=2, operations=40, modes=["grow"]).done_count
    )


# One test for each detector: what is broken, and what the soak says of it. ----------------------------------------


def test_a_wrong_value_is_found(monkeypatch: Patch):
    right = HostWrite._copy

    def broken(self: Any, slot: Any, value: Any, rag: Any, *part: Any) -> None:
        right(self, slot, value, rag, *part)
        if slot.size_class.nbytes:
            memory_of(slot).reshape(-1).view(np.uint8)[-1:] ^= 1

    monkeypatch.setattr(HostWrite, "_copy", every(5, broken, right))
    assert "elements of" in find()


def test_padding_that_is_not_made_good_is_found(monkeypatch: Patch):
    right = HostWrite._copy

    def broken(self: Any, slot: Any, value: Any, rag: Any, *part: Any) -> None:
        if rag is None:
            return right(self, slot, value, rag, *part)
        memory_of(slot)[(*(slice(None),) * rag.axis, slice(rag.size))] = value

    monkeypatch.setattr(HostWrite, "_copy", broken)
    assert "elements of" in find()


def test_a_source_that_is_read_after_put_returned_is_found(monkeypatch: Patch):
    right = HostWrite._copy

    def broken(self: Any, slot: Any, value: Any, rag: Any, *part: Any) -> None:
        threading.Timer(0.002, right, (self, slot, value, rag, *part)).start()

    monkeypatch.setattr(HostWrite, "_copy", every(5, broken, right))
    assert "elements of" in find()


def test_a_landing_that_does_not_wait_for_readers_is_found(monkeypatch: Patch):
    """The slot is written through its address while its last borrower still holds the memory."""
    right = HostWrite.land

    def broken(self: Any, prepared: Any, slots: Any, values: Any, rag: Any, *part: Any) -> None:
        for slot, value in zip(slots, values, strict=True):
            if not slot.array.is_deleted():
                self._copy(slot, value, rag, *part)
        right(self, prepared, slots, values, rag, *part)

    monkeypatch.setattr(HostWrite, "land", broken)
    # A step's array that was kept by mistake, or a view of it, reads the next tenant's data.
    assert "elements of" in find(seeds=20)


def test_a_slot_that_never_comes_back_is_found(monkeypatch: Patch):
    right = Arena._end
    monkeypatch.setattr(Arena, "_end", every(9, lambda self, loan: None, right))
    assert "still leased" in find(omit=["check"])


def test_a_slot_that_left_the_pool_is_found(monkeypatch: Patch):
    right = Arena._end

    def broken(self: Any, loan: Any) -> None:
        right(self, loan)
        for slot in loan.slots:
            if slot.loan is None and slot in slot.shelf.free:
                slot.shelf.free.remove(slot)
                self._remove(slot)
                return

    monkeypatch.setattr(Arena, "_end", every(9, broken, right))
    assert "are left of" in find("spill")


@pytest.mark.parametrize(("method", "says"), [("write", "moved to"), ("land", "addresses were seen")])
def test_a_move_that_is_not_counted_is_found(monkeypatch: Patch, method: str, says: str):
    cls: Any = DonatedLanding if method == "write" else HostWrite
    right = getattr(cls, method)

    def broken(self: Any, *args: Any) -> None:
        right(self, *args)
        if len(args) == 5 or (method == "land" and args[2][0].strides == (0,) * args[2][0].ndim):
            return  # A write or a fill of a lease, which the other case is about.
        for slot in args[1] if method == "land" else args[:1]:
            was = slot.array
            self._adopt(slot, jnp.array(was, copy=True))
            kept.append(was)  # Or the next copy might get its address.

    kept: list[Any] = []
    monkeypatch.setattr(cls, method, broken)
    assert says in find()


def test_a_slot_lent_twice_is_found(monkeypatch: Patch):
    right = Arena._take

    def broken(self: Any, *args: Any) -> Any:
        slots = right(self, *args)
        for slot in slots or ():
            slot.shelf.free.append(slot)
        return slots

    monkeypatch.setattr(Arena, "_take", every(7, broken, right))
    said = find(omit=["check"])
    assert (
        "hold the same memory" in said or "donate the same buffer twice" in said
    )  # The second is XLA's, in one batch.


def test_a_broken_invariant_is_found(monkeypatch: Patch):
    monkeypatch.setattr(Arena, "_give_up", lambda *_: True)
    assert "budget" in find()


def test_an_error_of_the_pool_is_found_and_can_be_replayed(monkeypatch: Patch):
    def broken(self: Any, *_: Any) -> None:
        raise OSError("a broken landing")

    monkeypatch.setattr(HostWrite, "land", broken)
    report = soak(seconds=20, seed=7, threads=1, classes=3, modes=["grow"])
    (failure,) = report.failures
    assert (failure.mode, failure.thread) == ("grow", 0)
    assert "a broken landing" in failure.what
    assert "test_soak" in failure.details
    again = soak(seconds=20, seed=7, threads=1, classes=3, modes=["grow"])
    assert again.failures[0].operation == failure.operation
    assert "--seed 7" in report.replay


def test_a_late_return_that_is_accepted_is_found(monkeypatch: Patch):
    monkeypatch.setattr(arenax.Lease, "_alive", lambda *_: None)
    assert "after its return" in find()


def test_a_deadlock_is_found(monkeypatch: Patch):
    gate = threading.Event()
    monkeypatch.setattr(_soak, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(Arena, "wrote", lambda *_: gate.wait(60))
    try:
        report = soak(seconds=0.5, seed=1, threads=2, classes=2, modes=["grow"])
    finally:
        gate.set()
    assert report.exit_status == 1
    assert "still in it" in str(report.failures[0])


# Failures on purpose, and long runs. ------------------------------------------------------------------------------


def test_failures_on_purpose_are_survived():
    report = soak(seconds=60, seed=4, threads=2, classes=2, operations=120, modes=["grow", "spill"], faults=True)
    assert report.failures == []
    assert len(report.struck_count) > 3
    assert report.struck_count.total() > 10
    assert report.replay.endswith(" --faults")


def test_failures_on_purpose_are_repeated():
    runs = [
        soak(seconds=60, seed=4, threads=1, classes=2, operations=60, modes=["grow"], faults=True) for _ in range(2)
    ]
    assert runs[0].struck_count == runs[1].struck_count
    assert runs[0].struck_count.total() > 0


def test_a_lease_that_a_failure_spoils_is_found(monkeypatch: Patch):
    right = arenax.Lease._run

    def broken(self: Any, operation: Any) -> None:
        try:
            right(self, operation)
        except Injected:
            memory_of(self._slot).reshape(-1).view(np.uint8)[...] = 0x77
            raise

    monkeypatch.setattr(arenax.Lease, "_run", broken)
    assert "after a failure on purpose" in find(faults=True, omit=["put", "step"])


def test_a_long_run_does_not_grow():
    report = endure(2_000, seed=3)
    assert (report.exit_status, report.done_count, report.failures) == (0, 2_000, [])
    assert report.verified_count > 30
    assert 0 < report.start_bytes <= report.warm_bytes


def test_growth_is_found(monkeypatch: Patch):
    sizes = iter([100 << 20, 150 << 20, 159 << 20])
    monkeypatch.setattr(_soak_steps, "resident_bytes", lambda: next(sizes))
    report = endure(100)
    assert report.exit_status == 1
    assert "grew by 9,216 KiB" in str(report.failures)


def test_a_wrong_value_in_a_long_run_is_found(monkeypatch: Patch):
    right = HostWrite.land

    def broken(self: Any, prepared: Any, slots: Any, values: Any, *rest: Any) -> None:
        right(self, prepared, slots, [np.zeros_like(value) for value in values], *rest)

    monkeypatch.setattr(HostWrite, "land", broken)
    report = endure(2_000)
    assert report.exit_status == 1
    assert "does not hold what was put" in str(report.failures)


def test_an_interrupted_long_run_reports_what_there_is():
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    report = endure(5_000, progress=interrupt)
    assert (report.exit_status, report.done_count, report.failures) == (130, 1, [])
    assert Endurance(0, 1, interrupted=True, failures=[_soak.Failure("grow", 0, 1, "step", "")]).exit_status == 1


def test_the_command_runs_so_many_steps(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    assert run("--steps", "300", "--seed", "6", "--json", str(file)) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["done_count"], report["exit_status"], report["failures"]) == (300, 0, [])
    assert "growth since the warm-up" in capsys.readouterr().out


# The command. ------------------------------------------------------------------------------------------


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    _stress_command.add_arguments(parser)
    return _stress_command.run(parser.parse_args(argv))


def test_the_command_prints_and_writes_a_report(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    status = run("--seconds", "2", "--seed", "6", "--classes", "2", "--modes", "grow", "wait", "--json", str(file))
    assert status == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["seed"], report["exit_status"], report["failures"]) == (6, 0, [])
    assert [*report["stats"]] == ["grow", "wait"]
    assert "No wrong byte" in capsys.readouterr().out


def test_the_command_names_what_failed(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]):
    right = _soak_holder.difference
    monkeypatch.setattr(_soak_holder, "difference", lambda *args: right(*args) or "is wrong")
    assert run("--seed", "6", "--classes", "2", "--modes", "grow", "--budget", "1MiB") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert 'FAILED: seed 6, on_exhausted="grow", thread' in shown
    assert "To run the same operations again: arenax stress --seed 6 --threads 2 --classes 2 --budget" in shown


def test_an_interrupt_reports_what_there_is(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    report = soak(seconds=30, seed=6, threads=2, classes=2, progress=interrupt)
    assert (report.exit_status, report.failures, report.seconds < 20) == (130, [], True)
    assert [*report.stats] == ["grow"]
    monkeypatch.setattr(_stress_command, "soak", lambda **_: report)
    assert run() == 130
    assert "Interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument", ["--seconds=0", "--seconds=inf", "--threads=0", "--classes=-1", "--modes=never", "--steps=0"]
)
def test_bad_arguments_exit_with_2(argument: str):
    with pytest.raises(SystemExit) as e:
        run(argument)
    assert e.value.code == 2


def test_a_report_is_an_error_before_it_is_an_interrupt():
    assert Report(0, 1, 1, interrupted=True, failures=[_soak.Failure("grow", 0, 1, "put", "wrong")]).exit_status == 1
