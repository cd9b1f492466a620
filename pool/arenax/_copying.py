"""Copies into memory that is not NumPy's own: one assignment where it is small, several threads where it is large.

One core alone cannot saturate the memory of most machines. And glibc copies what is larger than three quarters of the
shared cache with non-temporal stores, in a loop that is up to three times slower where source and destination lie at
nearly the same offset in their pages, as NumPy's and XLA's large arrays do (at 16 and at 64 bytes). Pieces of a MiB,
taken by several threads, avoid both.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PIECE_BYTES = 1 << 20
PARALLEL_BYTES = 8 << 20  # From here on it repays waking another thread, which takes 50 to 100 us.
THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
# One for all pools: more threads than this would only queue for the memory. It starts none before it is needed.
_helpers = ThreadPoolExecutor(max(THREADS - 1, 1), "arenax-copy")


def copy(target: Array, source: Any, owner: object, writers: "list[Future[None]]") -> None:
    """Copies `source` into `target`, of the same shape, casting as it goes; the GIL is released meanwhile.

    Args:
        target: A view of memory that `owner` owns.
        source: Anything of `target`'s shape that NumPy can assign.
        owner: Kept alive until the last byte is written.
        writers: Holds the helpers while they write. Where an interrupt ends this function early it is not empty, and
            whoever writes to that memory next has to `await_writers` first.
    """
    if target.nbytes < PARALLEL_BYTES or THREADS == 1:
        target[...] = source
        return
    pieces = deque(_pieces(target, np.asarray(source)))
    try:
        for _ in range(THREADS - 1):
            helper: Future[None] = Future()
            writers.append(helper)  # Before it is submitted, so that no interrupt leaves one that nobody knows of.
            try:
                _helpers.submit(_help, helper, pieces, owner)
            except RuntimeError:  # The interpreter is shutting down: we do it all ourselves.
                break
        _work(pieces, owner)
    finally:
        pieces.clear()
    errors = await_writers(writers)
    if errors:
        raise errors[0]


def await_writers(writers: "list[Future[None]]") -> list[BaseException]:
    """Waits until none of `writers` writes any more; returns their errors."""
    # One that has not begun finds nothing left to do; in a forked child it never would begin.
    errors = [writer.exception() for writer in writers if not writer.cancel()]
    writers.clear()
    return [e for e in errors if e is not None]


def _help(helper: "Future[None]", pieces: deque[tuple[Array, Array]], owner: object) -> None:
    if not helper.set_running_or_notify_cancel():
        return
    try:
        _work(pieces, owner)
    except BaseException as e:
        helper.set_exception(e)
    else:
        helper.set_result(None)


def _work(pieces: deque[tuple[Array, Array]], owner: object) -> None:  # noqa: ARG001
    while pieces:
        try:
            target, source = pieces.popleft()
        except IndexError:  # Another thread took the last one.
            return
        target[...] = source


def _pieces(target: Array, source: Array) -> Iterator[tuple[Array, Array]]:
    """Halves both along the first axis that can be cut, until the pieces are small."""
    axis = next((i for i, n in enumerate(target.shape) if n > 1), None)
    if target.nbytes <= PIECE_BYTES or axis is None:
        yield target, source
        return
    before, half = (slice(None),) * axis, target.shape[axis] // 2
    for part in (slice(half), slice(half, None)):
        index = (*before, part)
        yield from _pieces(target[index], source[index])
