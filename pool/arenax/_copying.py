"""Copies into memory that is not NumPy's own: one assignment where it is small, several threads where it is large.

One core alone cannot saturate the memory of most machines. And glibc copies what is larger than three quarters of the
shared cache with non-temporal stores, in a loop that is up to three times slower where source and destination lie at
nearly the same offset in their pages, as NumPy's and XLA's large arrays do (at 16 and at 64 bytes). Pieces of a MiB,
taken by several threads, avoid both.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
Index = tuple[Any, ...]
Piece = tuple[Array, Array, Index]
T = TypeVar("T")

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
    source = np.asarray(source)
    _share(deque((target, source, index) for index in _pieces(target)), [owner], [writers])


def copy_each(
    targets: Sequence[Array], sources: Sequence[Any], owners: Sequence[object], writers: "Sequence[list[Future[None]]]"
) -> None:
    """As `copy`, for several that are large together, each of them a piece; `writers` has a list for each of them."""
    if THREADS == 1 or sum(target.nbytes for target in targets) < PARALLEL_BYTES:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
        return
    pieces = zip(targets, map(np.asarray, sources), strict=True)
    _share(deque((target, source, (...,)) for target, source in pieces), [*owners], writers)


def _share(pieces: deque[Piece], owners: list[object], writers: "Sequence[list[Future[None]]]") -> None:
    """Copies the pieces in this thread and in helpers, which all of `writers` hold meanwhile."""
    # The owners are in a list, for us to take them out of: an executor holds the arguments of a call until some time
    # after its end, and an array, which is the borrower's next, would not come back in time for the next landing.
    try:
        for _ in range(THREADS - 1):
            helper: Future[None] = Future()
            for each in writers:
                each.append(helper)  # Before it is submitted, so that no interrupt leaves one that nobody knows of.
            try:
                _helpers.submit(_help, helper, pieces, owners)
            except RuntimeError:  # The interpreter is shutting down: we do it all ourselves.
                break
        _work(pieces)
    finally:
        pieces.clear()
    errors = [error for each in writers for error in await_writers(each)]
    owners.clear()
    if errors:
        raise errors[0]


def in_advance(function: Callable[[T], None], items: Iterable[T], count: int) -> Iterator[T]:
    """Yields each of `items` when `function` has been called with it; helpers do so for the next `count` meanwhile.

    Where an exception ends the iteration, helpers may still be at work.
    """
    coming: deque[tuple[T, Future[None] | None]] = deque()
    for item in items:
        coming.append((item, _begin(function, item) if coming else None))
        if len(coming) > count:
            yield _finished(function, *coming.popleft())
    while coming:
        yield _finished(function, *coming.popleft())


def await_writers(writers: "list[Future[None]]") -> list[BaseException]:
    """Waits until none of `writers` writes any more; returns their errors."""
    # One that has not begun finds nothing left to do; in a forked child it never would begin.
    errors = [writer.exception() for writer in writers if not writer.cancel()]
    writers.clear()
    return [e for e in errors if e is not None]


def _begin(function: Callable[[T], None], item: T) -> "Future[None] | None":
    try:
        return _helpers.submit(function, item)
    except RuntimeError:  # The interpreter is shutting down.
        return None


def _finished(function: Callable[[T], None], item: T, call: "Future[None] | None") -> T:
    if call is None or call.cancel():  # No helper has begun, and none will: do it here.
        function(item)
    else:
        call.result()
    return item


def _help(
    helper: "Future[None]",
    pieces: deque[Piece],
    owners: list[object],  # noqa: ARG001
) -> None:
    if not helper.set_running_or_notify_cancel():
        return
    try:
        _work(pieces)
    except BaseException as e:
        helper.set_exception(e)
    else:
        helper.set_result(None)


def _work(pieces: deque[Piece]) -> None:
    while pieces:
        try:
            target, source, index = pieces.popleft()
        except IndexError:  # Another thread took the last one.
            return
        target[index] = source[index]


def _pieces(target: Array) -> Iterator[Index]:
    """Cuts along the first axis one step of which is small enough, each step of the axes before it by itself."""
    shape = target.shape
    sizes = [target.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    axis = next(i for i, nbytes in enumerate(sizes) if nbytes <= PIECE_BYTES)
    count = PIECE_BYTES // sizes[axis]
    return itertools.product(*map(range, shape[:axis]), [slice(i, i + count) for i in range(0, shape[axis], count)])
