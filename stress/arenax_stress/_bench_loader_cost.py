"""What a loader costs beside time, as the system tells it: faults, CPU, memory, descriptors, shared-memory files."""

import ctypes
import gc
import multiprocessing
import os
import resource
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

SHARED_MEMORY = "/dev/shm"
PAGE = resource.getpagesize()
_IN_CREATE, _IN_Q_OVERFLOW = 0x100, 0x4000
_EVENT = struct.Struct("iIII")  # The watch, what happened, a cookie, and the length of the name behind it.


@attrs.frozen
class Usage:
    """What processes have used so far.

    Attributes:
        faults: Minor page faults.
        cpu_seconds: Seconds of CPU, in user space and in the kernel.
    """

    faults: int
    cpu_seconds: float

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(self.faults - before.faults, self.cpu_seconds - before.cpu_seconds)


def own_usage() -> Usage:
    """The usage of this process, all of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(used.ru_minflt, used.ru_utime + used.ru_stime)


def usage_of(pids: Iterable[int]) -> Usage | None:
    """The usage of other processes together; None where the system does not tell, or one of them is gone.

    Linux tells it in /proc, in ticks of 10 ms.
    """
    faults = ticks = 0
    try:
        for pid in pids:
            # Behind the name, which may hold spaces and brackets, come the fields from the third on.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            faults += int(fields[7])
            ticks += int(fields[11]) + int(fields[12])
    except OSError:
        return None
    return Usage(faults, ticks / os.sysconf("SC_CLK_TCK"))


def resident_bytes(pids: Iterable[int]) -> int | None:
    """The resident memory of processes together, shared pages counted in each; None where the system does not tell."""
    try:
        return sum(int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE for pid in pids)
    except OSError:
        return None


def descriptors() -> int | None:
    """How many files this process has open; None where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def children() -> set[int]:
    """The processes that this one has started by `multiprocessing` and that are alive."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def give_back_memory() -> None:
    """Returns freed memory to the system, so that what comes next does not grow into it unseen.

    glibc alone has a call for that; elsewhere the growth may be told too small.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform != "win32" else None
    if trim is not None:
        trim(0)


def settle() -> None:
    """Waits until the workers that there are have nothing to do, a second at most."""
    seen = None
    for _ in range(20):
        now = usage_of(children()), descriptors()
        if now == seen:
            return
        seen = now
        time.sleep(0.05)


class SharedFiles:
    """Counts the files that any process creates in shared memory, those that are unlinked at once too.

    By inotify, which is Linux's. Semaphores are left out: a queue makes some, when it is made.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        libc: Any = ctypes.CDLL(None) if sys.platform != "win32" else None
        if hasattr(libc, "inotify_init1"):
            fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(SHARED_MEMORY), _IN_CREATE) >= 0:
                self._fd = fd
            elif fd >= 0:
                os.close(fd)

    def count(self) -> int | None:
        """How many were created since the last call; None where the system does not tell, or they were too many."""
        if self._fd is None:
            return None
        created, lost = 0, False
        while True:
            try:
                events = os.read(self._fd, 2**16)
            except BlockingIOError:
                return None if lost else created
            at = 0
            while at < len(events):
                _, what, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size
                lost |= bool(what & _IN_Q_OVERFLOW)
                created += not events.startswith(b"sem.", at)
                at += length

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
