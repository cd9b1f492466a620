"""Landing ahead: a thread brings the next batches into slots while the consumer computes on this one."""

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Self

import jax

from arenax import BufferPool, CancelToken
from arenax._call_site import caller, work_for

from ._feed import Feed

# How long a drop or an interrupt waits for the thread. Without a limit it could hang on the iterable, or on a lock that
# the dropping thread itself holds.
_GRACE_SECONDS = 1.0


def prefetch(iterable: Iterable[Any], pool: BufferPool, size: int = 2, with_sizes: bool = False) -> "Prefetcher":
    """Lands up to `size` batches of an iterable ahead of the loop that consumes them, in a thread of its own.

    The batches come in order. The iterable runs in the thread, and is never more than `size` batches ahead. An
    exception of the iterable or of a landing is raised by `next` after the batches before it, with its traceback; after
    that, and at the end, `next` raises `StopIteration`. The thread ends, and every batch that was landed and not taken
    goes back, at the end, after an exception or an interrupt in `next`, on `close`, and when the iterator is dropped.

    **Slots.** A loop ``for batch in prefetch(...)`` has ``size + 2`` batches alive: `size` landed or in landing, the
    one in the consumer's hand, and, while `next` runs, the one before it, since ``for`` lets go of it only when `next`
    has returned. A loop that says ``del batch`` at its end has ``size + 1``, but not through `enumerate` or `zip`,
    which hold the last item too. Reserve that many, and more for what the loop itself draws from the pool or holds on
    to: a batch's slots go back when its last array is dropped.

    With fewer slots the pool's mode decides. Under ``"wait"`` the thread waits, and less is landed ahead; where the
    consumer asks for the next batch while he holds all the slots that it needs, he gets `PoolExhausted`, for nobody
    could ever return one. A thread that takes batches and hands them on to others holds them in this sense: give such a
    pool a timeout, under which the thread just waits.

    Args:
        iterable: Gives pytrees of NumPy arrays, or of anything else that `BufferPool.put` takes.
        pool: Where they land.
        size: Batches to land ahead, at least 1.
        with_sizes: Whether to give ``(batch, sizes)``, as `BufferPool.put` does.

    Returns:
        An iterator that is also a context manager. Any thread may call `next`; each batch goes to one of them.

    Raises:
        TypeError: Where `iterable` cannot be iterated, `pool` is no `BufferPool` or `size` no integer.
        ValueError: Where `size` is below 1.

    Example:
        >>> import arenax, numpy as np
        >>> from arenax_adapters.prefetch import prefetch
        >>> batches = ({"x": np.full((2, 3), i, np.float32)} for i in range(3))
        >>> with arenax.BufferPool() as pool, prefetch(batches, pool) as ahead:
        ...     for batch in ahead:
        ...         print(batch["x"].sum())
        0.0
        6.0
        12.0
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"iterable must give batches when iterated, got {type(iterable).__name__}")
    if not isinstance(pool, BufferPool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"pool must be an arenax.BufferPool, got {type(pool).__name__}")
    if isinstance(size, bool) or not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"size must be an integer, got {size!r}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")

    def land(batch: Any, token: CancelToken) -> Any:
        return pool.put(batch, with_sizes, cancel=token)

    return Prefetcher(iterable, Feed(pool, size, land, caller()))


class Prefetcher(Iterator[Any]):
    """The iterator that `prefetch` returns: the consumer's end of it, which the thread does not know of."""

    __slots__ = ("__weakref__", "_feed", "_finalizer", "_thread")

    def __init__(self, iterable: Iterable[Any], feed: Feed) -> None:
        self._feed = feed
        feed.serve(self)
        # `with jax.enable_x64(...)` is thread-local: the batches get the dtypes that they would get here.
        config: Any = jax.config
        args = (feed, iterable, config.jax_enable_x64)
        name = f"arenax-prefetch-{feed.pool.name}"
        # A daemon, since at exit the interpreter would wait for any other before it runs the finalizer that stops it.
        self._thread = threading.Thread(target=_land_ahead, args=args, name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _drop, feed, self._thread)
        self._thread.start()

    def __next__(self) -> Any:
        try:
            return self._feed.take()
        except BaseException:  # The end, an error, or an interrupt, after which no generator would go on either.
            self._feed.stop()
            self._feed.discard()  # Other consumers may be blocked.
            _wait_for_a_moment(self._thread)
            raise

    def close(self) -> None:
        """Ends the thread, waits until it has ended, and gives back every batch that was not taken. Idempotent.

        A landing under way is completed, a wait for a slot is cut short, and the iterable is closed, as a ``for`` loop
        does not do, if it is a generator. What cannot be interrupted is the iterable itself: where it blocks for ever,
        so does this.

        Raises:
            BaseException: Whatever closing the iterable raised.
        """
        feed = self._feed
        feed.awaited = True
        feed.stop()
        feed.discard()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._finalizer.detach()
        feed.raise_cleanup_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(feed: Feed, thread: threading.Thread) -> None:
    """Ends the thread, and waits for it if it is quick. Takes no lock: a finalizer, which also runs at exit."""
    feed.stop()
    feed.forget()
    _wait_for_a_moment(thread)


def _wait_for_a_moment(thread: threading.Thread) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_GRACE_SECONDS)


def _land_ahead(feed: Feed, iterable: Iterable[Any], x64: bool) -> None:
    """The thread: runs the iterable, lands its batches, closes it. No local variable ever holds what was landed."""
    iterator: Any = None
    error: BaseException | None = None
    cleanup_error: BaseException | None = None
    work_for(feed.site)
    with jax.enable_x64(x64):
        try:
            iterator = iter(iterable)
            while feed.wait_for_room():
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                feed.add(feed.land(batch, feed.token))
                del batch
        except StopIteration as e:
            # Of a leaf's `__array__`, say: it would end the consumer's loop in silence (PEP 479).
            error = RuntimeError("a landing raised StopIteration")
            error.__cause__ = _without_this_frame(e)
        except BaseException as e:
            error = _without_this_frame(e)
        try:
            _close(iterator, iterable)
        except BaseException as e:
            cleanup_error = _without_this_frame(e)
    feed.end(error, cleanup_error)
    try:
        if cleanup_error is not None and feed.closed and not feed.awaited:
            raise cleanup_error  # To `threading.excepthook`: nobody else will ever hear of it.
    finally:
        # A traceback holds its frames, and each of them its caller's: the iterable's hold this one.
        del error, cleanup_error


def _close(iterator: Any, iterable: Any) -> None:
    """Closes what `iter` made for us, and a generator; any other iterator, such as a file, is the caller's to close."""
    if iterator is not iterable or isinstance(iterator, Generator):
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _without_this_frame(error: BaseException) -> BaseException:
    """The error as the iterable or the landing raised it."""
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)
