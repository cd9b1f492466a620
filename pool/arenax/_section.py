"""The critical section of an arena: one lock, and a mark that tells whether it was left as it should be.

An exception may strike between any two calls inside it: the `KeyboardInterrupt` of a signal handler. So the section is
marked on entry, the mark is cleared on every orderly exit, and whoever finds it at the next entry mends first. The same
mark tells a handler or a finalizer that Python runs in the middle of the section, and that calls the arena again, from
another thread, which would simply have to wait.
"""

import threading
import time
from _thread import get_ident
from collections.abc import Callable
from typing import TypeVar

from ._errors import ArenaxError

TORN = -1
T = TypeVar("T")


class Section:
    """Calls functions one at a time, whatever strikes inside them.

    Args:
        mend: Called before the next function where an exception ended the last one; may be struck itself.
        reentered: Makes the error for a call in the middle of another.

    Attributes:
        lock: The lock.
        inside: The thread in the section, 0 where nobody is, `TORN` where nobody is and the last one was thrown out.
        mend: As given.
    """

    __slots__ = ("_reentered", "inside", "lock", "mend")

    def __init__(self, mend: Callable[[], None], reentered: Callable[[], Exception]) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.mend = mend
        self._reentered = reentered

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Returns ``function(*args)``, called under the lock; an `ArenaxError` of its own is an orderly exit.

        Raises:
            RuntimeError: Where this very thread is inside: Python has run a signal handler or a finalizer there.
        """
        me = get_ident()
        if self.lock.locked():
            self.stand_back(me)
        with self.lock:
            # No call between taking the lock and this line, so that no handler can run in between.
            was, self.inside = self.inside, me
            try:
                if was:
                    self.mend()
                result = function(*args)
            except BaseException as e:
                self.throw_out(e)
                raise
            self.inside = 0
        return result

    def throw_out(self, error: BaseException) -> None:
        """Marks the end of a section by an exception."""
        self.inside = 0 if isinstance(error, ArenaxError) else TORN

    def stand_back(self, me: int) -> None:
        """Lets whoever has the lock go on, rather than block on it at once.

        A thread that blocks is given the lock before it has the GIL; whoever runs meanwhile blocks in turn, and from
        then on each checkout costs two switches of threads (a lock convoy): four times as much with two threads.
        """
        for _ in range(100):
            if not self.lock.locked():
                return
            if self.inside == me:
                raise self._reentered()
            time.sleep(0)
