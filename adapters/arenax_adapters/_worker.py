"""What a worker process does for itself before its first batch: keep freed memory, end with its parent."""

import ctypes
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import wait
from typing import Any

# glibc's mallopt. Above the mmap threshold each sample would be mapped, faulted in and unmapped anew; above the trim
# threshold the top of the heap is given back after each batch, to be faulted in again by the next.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 1 << 25  # glibc refuses an mmap threshold above 32 MiB.


_prepared: set[int] = set()  # Processes; a forked one inherits its parent's.


def prepare_worker() -> None:
    """Keeps freed memory, and ends this process as soon as its parent is gone; once a process."""
    if os.getpid() in _prepared:
        return
    _prepared.add(os.getpid())
    keep_freed_memory()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="arenax-watch", daemon=True).start()


def _end_with(parent: Any) -> None:
    # The sentinel alone would not do: any child that the parent forks holds the pipe's other end.
    above = os.getppid()
    while os.getppid() == above and not wait([parent.sentinel], timeout=0.5):
        pass
    os._exit(1)


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for the next batch's samples.

    glibc alone; nothing is done where the environment variable ``ARENAX_WORKER_MALLOC`` is 0.

    Returns:
        Whether it was done.
    """
    mallopt = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.get("ARENAX_WORKER_MALLOC") == "0":
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
