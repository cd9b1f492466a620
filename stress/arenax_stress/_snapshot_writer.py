"""A trace as PyTorch's CUDA allocator would have recorded it: the writer of its memory snapshots, for its viewer.

The layout is documented at `torch.cuda.memory._snapshot`; `torch/utils/viz/MemoryViz.js` is what reads it.
"""

import pickle
from typing import Any

import numpy as np

from arenax import Trace
from arenax._trace_csv import class_text

from ._lab_map import Occupancy
from ._replay import replay
from ._sim_bfc import Bfc

# An address that no reader takes for none, low enough for a float to tell each byte apart.
BASE = 1 << 40
# The viewer reads 2 to 4.
PROTOCOL = 4


def dumps(trace: Trace) -> bytes:
    """Returns a pickle of `snapshot`."""
    return pickle.dumps(snapshot(trace), PROTOCOL)


def snapshot(trace: Trace) -> dict[str, Any]:
    """Returns the trace as ``torch.cuda.memory._snapshot()`` would, in plain dicts, lists and numbers.

    A trace has no addresses, so the buffers lie where XLA's allocator, simulated in one region without bounds, would
    put them; the region is the one segment. A buffer of no bytes takes the place of one byte.

    Args:
        trace: The trace.

    Example:
        >>> from arenax_stress._snapshot_writer import snapshot
        >>> found = snapshot(Trace.from_events([("allocate", "a", 512), ("allocate", "b", 100), ("free", "a", 512)]))
        >>> [entry["action"] for entry in found["device_traces"][0]]
        ['segment_alloc', 'alloc', 'alloc', 'free_requested', 'free_completed']
        >>> [(block["size"], block["requested_size"], block["state"]) for block in found["segments"][0]["blocks"]]
        [(512, 0, 'inactive'), (256, 100, 'active_allocated')]
    """
    placed = Occupancy()
    replay(Trace(trace.steps, np.maximum(trace.sizes, 1), name=trace.name), Bfc(), "bfc", placed)
    where = {buffer: (BASE + address, taken) for buffer, _, address, taken in placed.lives}
    frames = _frames(trace)
    events = _events(trace, where, frames, placed.height)
    segments = [_segment(trace, where, frames, placed.height)] if events else []
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}}


def _events(
    trace: Trace, where: dict[int, tuple[int, int]], frames: list[list[Any]], height: int
) -> list[dict[str, Any]]:
    times = _microseconds(trace)
    sizes = trace.sizes.tolist()
    found: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, frames: list[Any], event: int) -> None:
        entry: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        if times is not None:
            entry["time_us"] = times[event]
        found.append(entry)

    for event, step in enumerate(trace.steps.tolist()):
        buffer = max(step, ~step)
        address = where[buffer][0]
        if not event:
            add("segment_alloc", BASE, height, [], 0)
        if step >= 0:
            add("alloc", address, sizes[buffer], frames[buffer], event)
        else:  # The viewer makes one event of the two where nothing stands between them.
            add("free_requested", address, sizes[buffer], frames[buffer], event)
            add("free_completed", address, sizes[buffer], frames[buffer], event)
    return found


def _segment(trace: Trace, where: dict[int, tuple[int, int]], frames: list[list[Any]], height: int) -> dict[str, Any]:
    """The region as it is at the end, in blocks that leave nothing out."""
    sizes, ends = trace.sizes.tolist(), trace.lifetimes[1]
    alive = sorted((*where[buffer], buffer) for buffer in np.flatnonzero(ends == len(trace.steps)).tolist())
    blocks: list[dict[str, Any]] = []
    at = BASE
    for address, taken, buffer in alive:
        if address > at:
            blocks.append(_block(at, address - at, 0, "inactive", []))
        blocks.append(_block(address, taken, sizes[buffer], "active_allocated", frames[buffer]))
        at = address + taken
    if at < BASE + height:
        blocks.append(_block(at, BASE + height - at, 0, "inactive", []))
    active = sum(taken for _, taken, _ in alive)
    return {
        "device": 0,
        "address": BASE,
        "total_size": height,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(sizes[buffer] for *_, buffer in alive),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, requested: int, state: str, frames: list[Any]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def _frames(trace: Trace) -> list[list[Any]]:
    """The frames of each buffer: its size class is the function, if known; those of one class are one object."""
    unknown: list[Any] = []
    if trace.requests is None:
        return [unknown] * len(trace)
    known: dict[str, list[Any]] = {}
    return [
        known.setdefault(text, [{"filename": trace.name, "line": 0, "name": text}])
        for text in (class_text(request.size_class) for request in trace.requests)
    ]


def _microseconds(trace: Trace) -> list[int] | None:
    """Integers that a float holds exactly: a trace that counts in what would be more has its times scaled down."""
    if trace.times is None:
        return None
    scale = min(1e6, 2**53 / max(float(trace.times.max(initial=0)), 1.0))
    return np.rint(trace.times * scale).astype(np.int64).tolist()
