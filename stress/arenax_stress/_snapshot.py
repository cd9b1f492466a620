"""What PyTorch's CUDA allocator recorded of itself, as a trace: the reader of its memory snapshots.

The layout is documented at `torch.cuda.memory._snapshot`, and is as `torch/cuda/_memory_viz.py` reads and writes it.
"""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from arenax._trace import TraceBuilder

from ._plain_pickle import loads

_ALIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class _Change(NamedTuple):
    """An event that allocates or frees."""

    number: int
    is_free: bool
    address: int
    size: int
    time_us: int | None


def read(data: bytes, path: str, device: int) -> TraceBuilder:
    """Returns the trace of a device, ready to be built.

    Args:
        data: The pickle.
        path: What messages call it.
        device: The index of the device.

    Raises:
        BadTrace: Naming file, event and fault.
    """
    builder = TraceBuilder(path)
    try:
        snapshot = loads(data)
    except pickle.UnpicklingError as e:
        builder.refuse(str(e))
    changes = list(_changes(_events(snapshot, device, builder.refuse), builder.refuse))
    timed = all(change.time_us is not None for change in changes)
    start = min((change.time_us or 0 for change in changes), default=0)

    def seconds(change: _Change) -> float | None:
        return (change.time_us or 0) / 1e6 - start / 1e6 if timed else None

    before = _alive_before(changes, snapshot.get("segments"), device, builder.refuse)
    for address in sorted(before):
        builder.allocate(hex(address), before[address], f"address {address:#x}", time=0.0 if timed else None)
    for change in changes:
        where = f"event {change.number} of device {device}"
        if change.is_free:
            builder.free(hex(change.address), where, time=seconds(change))
        else:
            builder.allocate(hex(change.address), change.size, where, time=seconds(change))
    return builder


def _events(snapshot: Any, device: int, refuse: Callable[..., NoReturn]) -> list[Any]:
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list):
        refuse("holds no device_traces: it must be a snapshot as torch.cuda.memory._dump_snapshot writes it")
    if not 0 <= device < len(traces):
        refuse(f"has traces of {len(traces)} devices, and none of device {device}")
    events = traces[device]
    if not isinstance(events, list):
        refuse(f"the trace of device {device} must be a list, got {type(events).__name__}")
    if not events:
        others = ", ".join(str(i) for i, trace in enumerate(traces) if trace)
        hint = f"devices with events: {others}" if others else "was torch.cuda.memory._record_memory_history on?"
        refuse(f"has no events of device {device}; {hint}")
    return events


def _changes(events: list[Any], refuse: Callable[..., NoReturn]) -> list[_Change]:
    """The events that allocate or free. Segments, snapshots and failures are the allocator's own affair."""
    actions = [event.get("action") if isinstance(event, dict) else None for event in events]
    # Memory that another stream still uses is free when that is done. `skip_actions` can leave either of the two out.
    free = "free_completed" if "free_completed" in actions else "free_requested"
    found: list[_Change] = []
    for number, (event, action) in enumerate(zip(events, actions, strict=True)):
        if action == "alloc" or action == free:
            fields = [_integer(event, key, f"event {number}", refuse) for key in ("addr", "size")]
            time_us = _integer(event, "time_us", f"event {number}", refuse) if "time_us" in event else None
            found.append(_Change(number, action == free, fields[0], fields[1], time_us))
        elif not isinstance(action, str):
            refuse("must be a dict with an action", f"event {number}")
    return found


def _alive_before(
    changes: list[_Change], segments: Any, device: int, refuse: Callable[..., NoReturn]
) -> dict[int, int]:
    """Address and size of what was alive when the recording began.

    A recording has a beginning, and keeps its last `max_entries` events only. What it frees without having allocated
    it was there before, and so was what is alive at the end and was never allocated: the segments have that.
    """
    known: set[int] = set()
    before: dict[int, int] = {}
    for change in changes:
        if change.is_free and change.address not in known:
            before[change.address] = change.size
        known.add(change.address)
    if not isinstance(segments, list):
        refuse("must have a list of segments")
    for segment in segments:
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        if not isinstance(blocks, list):
            refuse("a segment must be a dict with a list of blocks")
        if not blocks or segment.get("device", device) != device:
            continue
        address = _integer(segment, "address", "a segment", refuse)
        for block in blocks:
            if not isinstance(block, dict):
                refuse(f"a block must be a dict, got {type(block).__name__}")
            size = _integer(block, "size", "a block", refuse)
            if block.get("state") in _ALIVE and address not in known:
                before[address] = _integer(block, "requested_size", "a block", refuse, default=size)
            address += size  # Older versions do not write the address of a block.
    return before


def _integer(
    fields: dict[Any, Any], key: str, where: str, refuse: Callable[..., NoReturn], default: int | None = None
) -> int:
    value = fields.get(key, default)
    bits = 64 if key in ("addr", "address") else 63
    if type(value) is not int:
        refuse(f"{key} must be an integer, got {type(value).__name__}", where)
    if not 0 <= value < 2**bits:
        refuse(f"{key} must be at least 0 and below 2**{bits}", where)
    return value
