"""What a pool is asked about itself, and the care that is taken of it: figures, recordings, checks, the end."""

import contextlib
import importlib
import os
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

from ._compiles import CompileCounter
from ._home import Home
from ._measure import JointMeter, Measure
from ._record import VARIABLE, Recorder, from_environment
from ._refusals import unsteady
from ._stats import Stats, human_bytes
from ._trace import Trace


class Upkeep:
    """The part of a pool that draws nothing.

    Args:
        name: The pool's name in messages.
        homes: Its arenas with their landings.
        counter: Counts the programs that the pool compiles, and those compiled inside its steps.

    Attributes:
        name: As given.
        homes: As given.
        compile_counter: As given.
        arena: The first home's arena.
        landing: The first home's landing.
        planner: The first home's planner.
        exact_planner: The first home's planner of exact shapes.
    """

    def __init__(self, name: str, homes: Sequence[Home], counter: CompileCounter) -> None:
        self.name = name
        self.homes = tuple(homes)
        self.compile_counter = counter
        first = homes[0]
        self.arena, self.landing = first.arena, first.landing
        self.planner, self.exact_planner = first.planner, first.exact_planner
        self._meter = first.meter if len(homes) == 1 else JointMeter([home.meter for home in homes])
        self._recorder = from_environment(name)
        if self._recorder is not None:
            for home in homes:
                home.arena.begin_recording(self._recorder)
            weakref.finalize(self, self._recorder.finish)

    def home(self, device: Any) -> Home:
        """Returns the home of a device, or of a sharding on the pool's devices.

        Raises:
            ValueError: Where it has none.
        """
        for home in self.homes:
            if home.has(device):
                return home
        raise ValueError(
            f"device must be one of those of pool {self.name!r}, {self._where}, or where it has shardings a "
            f"jax.sharding.NamedSharding on them; got {device}"
        )

    @contextlib.contextmanager
    def steady(self) -> Generator[None]:
        """A scope in which the pool may not allocate, copy or compile.

        Raises:
            NotSteady: Naming the cause and the call site. Creation, spill, conversion and copy raise at once, in
                whichever thread; compiles of this thread or of the pool raise at the end.

        Example:
            >>> import arenax, numpy as np
            >>> batch = np.ones((4,), np.float32)
            >>> with arenax.BufferPool() as pool:
            ...     pool.reserve(batch, slots=1)
            ...     del_me = pool.put(batch)  # Warms up: compiles the landing.
            ...     del del_me
            ...     with pool.steady():
            ...         for _ in range(100):
            ...             x = pool.put(batch)
            ...             del x
        """
        here, before = CompileCounter(), self.compile_counter.count
        scopes = [home.arena.begin_steady() for home in self.homes]
        try:
            with here.watch():
                yield
        finally:
            for scope in scopes:
                scope.over = True
        counter = here if here.count else self.compile_counter
        count = here.count or self.compile_counter.count - before
        if count:
            names = [*counter.names][-min(count, 4) :]
            what = f"{count} programs, the last of them {', '.join(names)}"
            raise unsteady(self.arena, "compile", what)

    def stats(self) -> Stats:
        """Returns a frozen snapshot of the pool's figures; ``str()`` of it is a table."""
        return self._meter.of_life()

    def measure(self) -> Measure:
        """A scope whose own peaks and counts are kept.

        Returns:
            A `Measure`, to be used as ``with pool.measure() as m:``. ``m.stats`` is a `Stats` of the scope: what was
            counted in it, and the peaks that there were, up to its end, or to now while it lasts.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool() as pool:
            ...     for epoch in range(2):
            ...         with pool.measure() as m:
            ...             for n in range(10):
            ...                 with pool.step() as step:
            ...                     x = step.put(np.full(256, n, np.float32))
            ...         print(m.stats.creation_count, m.stats.hit_count, m.stats.peak_leased_bytes)
            1 9 1024
            0 10 1024
        """
        return Measure(self._meter)

    @contextlib.contextmanager
    def record(self, path: str | os.PathLike[str] | None = None) -> Generator[Trace]:
        """A scope in which every loan and return is recorded; what is on loan when it begins comes first.

        It is written as it goes, in the columns of RMM's logs; ``arenax bench put`` says what that costs, some
        hundredths of a small put. The environment variable ``ARENAX_RECORD=FILE`` records the whole life of every pool,
        the first in that file and others beside it.

        Args:
            path: The file, which stays; None is a temporary one, which goes with the trace.

        Returns:
            A `Trace`; one looked at before the end of the scope holds what was written until then.

        Raises:
            OSError: Where the file cannot be written.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(4, 64))) as pool:
            ...     with pool.record() as trace:
            ...         for n in (5, 7, 12):
            ...             with pool.step() as step:
            ...                 x = step.put(np.ones(n, np.float32))
            ...     print([event[:3] for event in trace][:3], trace.requests[0].shape)
            [('allocate', 0, 20), ('free', 0, 20), ('allocate', 1, 28)] (5,)
        """
        recorder = Recorder.to(path)
        try:
            for home in self.homes:
                home.arena.begin_recording(recorder)
            yield Trace.of(recorder, self.name)
        finally:
            recorder.over = True
            self._end_recording(recorder)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page on where memory is lost with what was recorded so far, and whether this pool saves any.

        It is what ``arenax lab`` says of a recording: the same loans under XLA's allocator and others, which are
        simulated, and with a plan that is fitted to them. It takes seconds to minutes; the recording goes on meanwhile,
        and what comes in is not in it. Of several recordings, the one that began last is taken; the loans of a pool
        with several devices are told as those of one.

        Args:
            path: A folder, made where there is none: the page is its `report.html`, with `report.json` and a picture
                of each chart beside it. Or the page itself, with a name that ends in ``.html``.

        Returns:
            The path of the page.

        Raises:
            RuntimeError: Where no recording runs.
            ValueError: Where it holds no loan yet.
            ImportError: Without ``pip install "arenax[tools]"``.
            OSError: Where the files cannot be written.

        Example:
            >>> import arenax, numpy as np, tempfile
            >>> with tempfile.TemporaryDirectory() as folder, arenax.BufferPool() as pool, pool.record():
            ...     for n in (5, 7, 12):
            ...         with pool.step() as step:
            ...             x = step.put(np.ones(n, np.float32))
            ...     print(pool.report(folder).name)
            report.html
        """
        recorders = self.arena.recorders
        if not recorders:
            raise RuntimeError(
                f"pool {self.name!r} records nothing, so there is nothing to report: call report inside "
                f"`with pool.record():`, or set {VARIABLE}=FILE in the environment"
            )
        # The one place where the pool knows of the stress package. Its modules need what `import arenax` never does, so
        # they are looked for only now; and by name, so that no tool takes them for something that the pool needs.
        try:
            lab = importlib.import_module("arenax_stress._lab_report")
        except ImportError as e:
            raise ImportError(f'pool.report needs the tools ({e}): pip install "arenax[tools]"') from e
        for home in self.homes:
            home.arena.write_recording(recorders[-1])
        # Read once: the trace that `record` gives reads its file again on every look.
        trace = recorders[-1].read()
        trace.name = self.name
        page: Path = lab.page_of(path)
        lab.write_report(trace, page)
        return page

    def trim(self, to_bytes: int = 0) -> int:
        """Frees idle slots, those that are of least use first, until no more than `to_bytes` are reserved.

        What is on loan stays; slots that were reserved are no exception. Which go first is decided as for a conversion,
        by how long they lie idle and what they would cost to make again for each byte.

        Args:
            to_bytes: The bytes that may stay reserved; 0 gives back all that is idle.

        Returns:
            The bytes given back.

        Example:
            >>> import arenax
            >>> with arenax.BufferPool() as pool:
            ...     pool.reserve(arenax.ArraySpec((256,), "float32"), slots=4)
            ...     print(pool.trim(to_bytes=2500), pool.stats().reserved_bytes)
            2048 2048
        """
        if isinstance(to_bytes, bool) or not isinstance(to_bytes, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"to_bytes must be an integer, got {to_bytes!r}")
        if to_bytes < 0:
            raise ValueError(f"to_bytes must be at least 0, got {to_bytes}")
        excess = max(sum(home.arena.tally.reserved_bytes for home in self.homes) - to_bytes, 0)
        given_back = 0
        for home in self.homes:  # What one cannot give, the next one does.
            mine = home.arena.tally.reserved_bytes
            given_back += home.arena.trim(max(mine - max(excess - given_back, 0), 0))
        return given_back

    def check(self) -> None:
        """Verifies every invariant of the pool, and takes back what was lost by an interrupt.

        Raises:
            AssertionError: Naming the invariant that is broken.
        """
        for home in self.homes:
            home.arena.check()

    def close(self) -> None:
        """Frees every idle slot and refuses every waiter; arrays on loan stay valid until dropped. Idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._end_recording(recorder)
        for home in self.homes:
            home.arena.close()

    def _end_recording(self, recorder: Recorder) -> None:
        for home in self.homes:
            home.arena.end_recording(recorder)
        recorder.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self.stats()
        if self.arena.closed:
            return f"<BufferPool {self.name!r} on {self._where}: closed>"
        limit = "" if s.budget_bytes is None else f" of {human_bytes(s.budget_bytes)}"
        return (
            f"<BufferPool {self.name!r} on {self._where}: {s.slot_count} slots in {len(s.by_class)} classes, "
            f"{s.leased_count} leased, {human_bytes(s.reserved_bytes)}{limit} reserved>"
        )

    @property
    def _where(self) -> str:
        return ", ".join(home.landing.name for home in self.homes)
