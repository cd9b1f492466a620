"""The figures of a pool: live tallies inside the arena, frozen snapshots for the user."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, sub
from typing import Any, Self

import attrs

from ._request import SizeClass

GAUGES = ("reserved_bytes", "leased_bytes", "requested_bytes", "idle_bytes", "slot_count", "leased_count")
COUNTERS = (
    "hit_count",
    "creation_count",
    "conversion_count",
    "converted_bytes",
    "spill_count",
    "copy_count",
    "write_count",
    "written_bytes",
    "wait_count",
)
PEAKS = tuple(f"peak_{g}" for g in GAUGES)
_FIGURES = (*GAUGES, *PEAKS, *COUNTERS)
_gauges_of, _peaks_of, _counters_of = attrgetter(*GAUGES), attrgetter(*PEAKS), attrgetter(*COUNTERS)


@attrs.define(eq=False)
class Tally:
    """Gauges, their peaks, and counters of one size class or one arena; changed only under the arena's lock.

    The peaks are those since `restart_peaks`; what came before, a `Meter` remembers.

    An arena's own counters stay 0, since they are the sums over its classes, but for `wait_count`: one wait may be for
    several classes.

    Invariants: reserved = leased + idle; requested <= leased; each peak >= its gauge; counters never fall.
    """

    slot_count: int = 0
    leased_count: int = 0
    reserved_bytes: int = 0
    leased_bytes: int = 0
    requested_bytes: int = 0
    peak_slot_count: int = 0
    peak_leased_count: int = 0
    peak_reserved_bytes: int = 0
    peak_leased_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_idle_bytes: int = 0
    hit_count: int = 0
    creation_count: int = 0
    conversion_count: int = 0
    converted_bytes: int = 0
    spill_count: int = 0
    copy_count: int = 0
    write_count: int = 0
    written_bytes: int = 0
    wait_count: int = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that nobody holds."""
        return self.reserved_bytes - self.leased_bytes

    def add_slot(self, nbytes: int) -> None:
        """A slot enters, not leased yet."""
        self.slot_count += 1
        self.reserved_bytes += nbytes
        self.peak_slot_count = max(self.peak_slot_count, self.slot_count)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def remove_slot(self, nbytes: int) -> None:
        """A slot that is not leased leaves."""
        self.slot_count -= 1
        self.reserved_bytes -= nbytes

    def peaks(self) -> tuple[int, ...]:
        """The highest of each gauge since `restart_peaks`, in the order of `GAUGES`."""
        # Slots that `reserve` is still making lie idle before the peak of idle bytes is told of them.
        return tuple(map(max, _gauges_of(self), _peaks_of(self)))

    def restart_peaks(self) -> None:
        """Has each peak begin anew, at its gauge."""
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_leased_bytes = self.leased_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_idle_bytes = self.idle_bytes
        self.peak_slot_count = self.slot_count
        self.peak_leased_count = self.leased_count

    def counters(self) -> tuple[int, ...]:
        """The counters, in the order of `COUNTERS`."""
        return _counters_of(self)


@attrs.frozen(kw_only=True)
class Stats:
    """A snapshot of a pool's figures. Bytes are bytes of slots, at the size of their classes.

    Attributes:
        reserved_bytes: Bytes of all slots; never above the budget.
        leased_bytes: Bytes of slots on loan.
        requested_bytes: Bytes that the borrowers asked for, before padding.
        idle_bytes: Reserved less leased bytes.
        slot_count: Slots.
        leased_count: Slots on loan.
        hit_count: Leaves that were served by a slot that existed already.
        creation_count: Buffers made for slots: on reserve, on growth, and to replace one that was kept or lost.
        conversion_count: Slots made at the price of idle slots of other classes. One that took over the buffer of a
            slot with as many bytes, and elements of the same size, is no creation.
        converted_bytes: Bytes of the slots so made.
        spill_count: Leaves that got a fresh array outside the pool and its budget.
        copy_count: Landings whose slot had moved: its donation had silently become a copy.
        write_count: Landings and writes, those that failed on their way too.
        written_bytes: Bytes that these asked for, without padding.
        compile_count: Programs compiled by the pool and inside its steps (0 in parts of the whole).
        wait_count: Checkouts that had to wait.
        peak_reserved_bytes: Highest `reserved_bytes`.
        peak_leased_bytes: Highest `leased_bytes`.
        peak_requested_bytes: Highest `requested_bytes`.
        peak_idle_bytes: Highest `idle_bytes`.
        peak_slot_count: Highest `slot_count`.
        peak_leased_count: Highest `leased_count`.
        budget_bytes: The budget, or None.
        landing: How values land: ``"host write"``, ``"pinned ring"``, or with the form that the device was found to
            take, ``"pinned ring, fused"`` or ``"pinned ring, split"``. Empty in parts of the whole.
        by_class: The same figures for each size class.
        by_device: The same figures for each device, by its name. Of a sharded pool each device has an equal share of
            the bytes, and all counts, since each slot has a part on each.
    """

    reserved_bytes: int = 0
    leased_bytes: int = 0
    requested_bytes: int = 0
    idle_bytes: int = 0
    slot_count: int = 0
    leased_count: int = 0
    hit_count: int = 0
    creation_count: int = 0
    conversion_count: int = 0
    converted_bytes: int = 0
    spill_count: int = 0
    copy_count: int = 0
    write_count: int = 0
    written_bytes: int = 0
    compile_count: int = 0
    wait_count: int = 0
    peak_reserved_bytes: int = 0
    peak_leased_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_idle_bytes: int = 0
    peak_slot_count: int = 0
    peak_leased_count: int = 0
    budget_bytes: int | None = None
    landing: str = ""
    by_class: Mapping[SizeClass, "Stats"] = attrs.field(factory=dict)
    by_device: Mapping[str, "Stats"] = attrs.field(factory=dict)

    @classmethod
    def of(cls, tally: Tally, peaks: Sequence[int], before: Sequence[int], **more: Any) -> Self:
        """Freezes a tally: its gauges, the given peaks, and what its counters have gained over those given."""
        figures = (*_gauges_of(tally), *peaks, *map(sub, _counters_of(tally), before))
        return cls(**dict(zip(_FIGURES, figures, strict=True)), **more)

    @classmethod
    def of_arena(
        cls,
        tally: Tally,
        peaks: Sequence[int],
        before: Sequence[int],
        by_class: Mapping[SizeClass, "Stats"],
        **more: Any,
    ) -> Self:
        """Freezes an arena's tally, its counters being the sums over its classes."""
        sums = {n: sum(getattr(s, n) for s in by_class.values()) for n in COUNTERS if n != "wait_count"}
        return attrs.evolve(cls.of(tally, peaks, before, by_class=by_class, **more), **sums)

    @classmethod
    def joint(cls, parts: Sequence["Stats"]) -> "Stats":
        """The sums over several arenas; those of peaks bound the peak of the sum."""
        sums = {name: sum(getattr(p, name) for p in parts) for name in _FIGURES}
        classes = dict.fromkeys(c for p in parts for c in p.by_class)
        by_class = {c: cls.joint([p.by_class[c] for p in parts if c in p.by_class]) for c in classes}
        budgets = [p.budget_bytes for p in parts]
        return cls(
            **sums,
            compile_count=parts[0].compile_count,  # Counted once for all.
            budget_bytes=None if None in budgets else sum(b for b in budgets if b is not None),
            landing=parts[0].landing,
            by_class=by_class,
            by_device={name: stats for p in parts for name, stats in p.by_device.items()},
        )

    def share(self, count: int) -> "Stats":
        """The figures of one of `count` devices with equal parts of everything: bytes are divided, counts are not."""
        bytes_of = {name: getattr(self, name) // count for name in _FIGURES if name.endswith("_bytes")}
        budget = None if self.budget_bytes is None else self.budget_bytes // count
        by_class = {c: s.share(count) for c, s in self.by_class.items()}
        return attrs.evolve(self, **bytes_of, budget_bytes=budget, by_class=by_class)

    @property
    def skew(self) -> float:
        """The highest peak of leased bytes of a device / the mean over the devices; 1 where they are equal."""
        peaks = [s.peak_leased_bytes for s in self.by_device.values()]
        return max(peaks) * len(peaks) / sum(peaks) if any(peaks) else 1.0

    @property
    def internal_waste(self) -> float:
        """Share of the leased bytes that nobody asked for: 1 - requested / leased, 0 where nothing is leased."""
        return 1 - self.requested_bytes / self.leased_bytes if self.leased_bytes else 0.0

    @property
    def stranding(self) -> float:
        """Sum of the classes' own peaks of leased bytes / peak of their sum; 1 where nothing was ever leased.

        Above 1, the classes peaked at different times, and each one's slots lay idle while another was short.
        """
        peaks = sum(c.peak_leased_bytes for c in self.by_class.values())
        return peaks / self.peak_leased_bytes if self.peak_leased_bytes else 1.0

    @property
    def realized_fragmentation(self) -> float:
        """(peak reserved - peak requested) / peak requested bytes; 0 where nothing was ever requested."""
        peak = self.peak_requested_bytes
        return (self.peak_reserved_bytes - peak) / peak if peak else 0.0

    def memory_stats(self) -> dict[str, int]:
        """Returns the figures under the keys of `jax.Device.memory_stats`, on every backend; a limit of 0 is none.

        Example:
            >>> import arenax
            >>> with arenax.BufferPool() as pool:
            ...     pool.reserve(arenax.ArraySpec((256,), "float32"), slots=2)
            ...     pool.stats().memory_stats()["pool_bytes"]
            2048
        """
        largest = max((c.nbytes for c, s in self.by_class.items() if s.slot_count > s.leased_count), default=0)
        return {
            "bytes_in_use": self.leased_bytes,
            "peak_bytes_in_use": self.peak_leased_bytes,
            "bytes_reserved": self.reserved_bytes,
            "peak_bytes_reserved": self.peak_reserved_bytes,
            "pool_bytes": self.reserved_bytes,
            "peak_pool_bytes": self.peak_reserved_bytes,
            "num_allocs": self.hit_count + self.creation_count,
            "largest_alloc_size": max((c.nbytes for c in self.by_class), default=0),
            "largest_free_block_bytes": largest,
            "bytes_limit": self.budget_bytes or 0,
            "bytes_reservable_limit": self.budget_bytes or 0,
        }

    def __str__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"budget {human_bytes(self.budget_bytes)}"
        events = ", ".join(
            f"{getattr(self, f'{name}_count'):,} {label}"
            for name, label in (
                ("hit", "hits"),
                ("creation", "creations"),
                ("conversion", "conversions"),
                ("spill", "spills"),
                ("copy", "copies"),
                ("compile", "compiles"),
                ("wait", "waits"),
            )
        )
        rows: list[tuple[str, ...]] = [
            ("size class", "slots", "leased", "peak", "reserved", "requested", "hits", "created", "spilled")
        ]
        parts = [(str(c), s) for c, s in self.by_class.items()]
        for name, s in [*parts, ("all", self)]:
            counts = (s.slot_count, s.leased_count, s.peak_leased_count)
            sizes = (human_bytes(s.reserved_bytes), human_bytes(s.requested_bytes))
            rows.append((name, *map(str, counts), *sizes, str(s.hit_count), str(s.creation_count), str(s.spill_count)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        padding = f"; padding {self.internal_waste:.1%} of what is leased" if self.leased_bytes else ""
        landing = f"; landing: {self.landing}" if self.landing else ""
        return "\n".join([*table, events, f"{budget}{padding}{landing}"])


def human_bytes(n: int) -> str:
    """Returns `n` bytes in the largest binary unit that keeps it at 1 or more.

    Example:
        >>> from arenax._stats import human_bytes
        >>> human_bytes(1536), human_bytes(3)
        ('1.5 KiB', '3 B')
    """
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
