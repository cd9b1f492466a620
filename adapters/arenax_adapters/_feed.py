"""The feed: what the consumer of `prefetch` and its thread share, and how each waits for the other."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from arenax import BufferPool, CancelToken


class Feed:
    """What the consumer and the thread share. Neither holds the other, so that a dropped consumer is noticed.

    The lock is for the two of them. `stop` takes none, nor does anything that it calls: a finalizer can run on any
    allocation, also while this very thread holds this lock or the arena's. So the thread waits on a `SimpleQueue`,
    which forgets no wake-up, rather than on a condition, where a finalizer that strikes between the test and the wait
    is missed.

    Invariants: batches landed and not taken are at most `size`; `token` is starving only while no batch is there and
    every living thread that takes batches is blocked on the next one.

    Attributes:
        pool: Where batches land.
        land: Lands a batch; the second argument ends its wait.
        site: The file and the line that asked for the batches.
        token: Marks the batches of this consumer, and ends a wait for a slot.
        awaited: Whether somebody waits in `close` for the thread to end.
    """

    def __init__(
        self, pool: BufferPool, size: int, land: Callable[[Any, CancelToken], Any], site: tuple[str, int]
    ) -> None:
        self.pool = pool
        self.land = land
        self.site = site
        self.token = CancelToken()
        self._home = os.getpid()
        self._closed = False
        self._consumer: weakref.ref[Any] | None = None
        self.awaited = False
        self._room = size  # Batches that the thread may land without a look at `_taken`; its own.
        self._taken: SimpleQueue[object] = SimpleQueue()
        # Where a wait has a deadline there is no deadlock to be broken.
        self._may_starve = pool.arena.timeout is None
        self._lock = threading.Lock()
        self._landed: deque[Any] = deque()
        self._takers: set[threading.Thread] = set()
        self._blocked: deque[tuple[threading.Thread, SimpleQueue[None]]] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._cleanup_error: BaseException | None = None

    @property
    def closed(self) -> bool:
        """Whether the consumer wants no more, or is dead."""
        return self._closed or (self._consumer is not None and self._consumer() is None)

    # The consumer's side. No local variable holds a batch: an interrupt's traceback would keep it alive. --------------

    def take(self) -> Any:
        """Returns the next batch, blocking until there is one.

        Raises:
            StopIteration: At the end.
            BaseException: What ended the thread, once.
        """
        if self._is_forked():
            self.pool.check()  # Raises, and says why.
        me = threading.current_thread()
        while True:
            # Critical section.
            with self._lock:
                if self.closed:
                    raise StopIteration
                self._takers.add(me)
                if self._landed:
                    self._taken.put(None)
                    return self._landed.popleft()
                if self._ended:
                    raise self._verdict()
                signal: SimpleQueue[None] = SimpleQueue()
                self._blocked.append((me, signal))
                blocked = {thread for thread, _ in self._blocked}
                if self._may_starve and all(t in blocked or not t.is_alive() for t in self._takers):
                    self.token.starve(True)
            signal.get()

    def discard(self) -> None:
        """Gives back what was landed, and sends away whoever is blocked."""
        if self._is_forked():  # The thread is not in this process, and whoever had the lock at the fork neither.
            return
        # Critical section.
        with self._lock:
            self.forget()
            self._send_away()

    def raise_cleanup_error(self) -> None:
        """Raises what closing the iterable raised, once."""
        error, self._cleanup_error = self._cleanup_error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # Its traceback holds this frame.

    def serve(self, consumer: object) -> None:
        """Ends with `consumer`: its death wakes the thread, by a callback in C that nothing can interrupt."""
        self._consumer = weakref.ref(consumer, self._taken.put)
        self.token.follow(consumer)

    def _is_forked(self) -> bool:
        return os.getpid() != self._home

    def _verdict(self) -> BaseException:
        error, self._error = self._error, None
        return StopIteration() if error is None else error

    # Both sides, without a lock. --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Tells the thread to end, wherever it waits. Takes no lock: a finalizer calls this."""
        self._closed = True
        self.token.cancel()
        self._taken.put(None)

    def forget(self) -> None:
        """Lets go of what was landed and not taken."""
        self._landed.clear()

    # The thread's side. -----------------------------------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Blocks until one more batch may be landed; False where the consumer wants no more."""
        if self._room:
            self._room -= 1
        else:
            self._taken.get()
        return not self.closed

    def add(self, batch: Any) -> None:
        """Hands a batch over."""
        # Critical section.
        with self._lock:
            self._landed.append(batch)
            # Before the next landing can ask: the consumer may take long to wake up, and does not starve.
            self.token.starve(False)
            if self._blocked:
                self._blocked.popleft()[1].put(None)

    def end(self, error: BaseException | None, cleanup_error: BaseException | None) -> None:
        """Says that no more batches come; the errors go to whoever asks for the next one, or closes."""
        # Critical section.
        with self._lock:
            self._ended = True
            if self.closed:
                self._cleanup_error = cleanup_error
                self.forget()  # What was added after the consumer had forgotten.
            else:
                self._error = error or cleanup_error
            self._send_away()
        if error is not None and cleanup_error is not None:
            error.add_note(f"Closing the iterable after that raised {cleanup_error!r}.")

    def _send_away(self) -> None:
        while self._blocked:
            self._blocked.popleft()[1].put(None)
