"""Nameless shared memory of the operating system: a memfd, reserved before it is touched and mapped in parts.

Needs Linux. Nothing has a name in /dev/shm, so nothing stays there, and no resource tracker knows of it: the memory
goes when the last process that has it open or mapped is gone, however it went.
"""

import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
AVAILABLE = hasattr(os, "memfd_create")
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform != "win32" else None
if AVAILABLE:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """A mapped part of a shared file, all of it in memory; unmapped when the last array on it is gone.

    Args:
        fd: The file.
        offset: Where the part begins, a multiple of the page size.
        nbytes: Its length; the file must have memory there.

    Raises:
        OSError: Where the system refuses.
    """

    # Not Python's `mmap`, which keeps a duplicate of the descriptor for each mapping (until 3.13's `trackfd`).
    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self.address = 0
        self.nbytes = nbytes
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {nbytes} bytes of shared memory: {os.strerror(code)}")
        self.address = address

    # Not a `weakref.finalize`, which would unmap at exit what arrays may still be read from.
    def __del__(self, munmap: Any = AVAILABLE and _libc.munmap) -> None:
        if self.address:
            munmap(self.address, self.nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of it as uint8; the array keeps the mapping."""
        return np.asarray(self)


class SharedFile:
    """A nameless file in memory, opened in this process and closed with this object.

    It pickles as the way to it, and the copy opens it anew when it is first used, so that it may travel to a worker by
    whatever way: spawn, forkserver, fork, or inside something that cloudpickle has made bytes of.
    """

    def __init__(self) -> None:
        self._adopt(os.memfd_create("arenax", os.MFD_CLOEXEC))

    def _adopt(self, fd: int) -> None:
        status = os.fstat(fd)
        self._fd: int | None = fd
        self._owner = os.getpid()
        self._route = (f"/proc/{self._owner}/fd/{fd}", status.st_dev, status.st_ino)
        self._finalizer = weakref.finalize(self, _close_in, self._owner, fd)

    def __getstate__(self) -> tuple[str, int, int]:
        return self._route

    def __setstate__(self, route: tuple[str, int, int]) -> None:
        self._route = route
        self._fd = None
        self._owner = None

    def fd(self) -> int:
        """The descriptor, of this process.

        Raises:
            RuntimeError: Where the process that made the file is gone.
        """
        # A forked child must not use its parent's, which is closed in it as soon as the parent's object is.
        if self._fd is None or self._owner != os.getpid():
            path, dev, ino = route = self._route
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as e:
                raise RuntimeError("the process that this worker fills shared memory for is gone") from e
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (dev, ino):  # Another file has its number now.
                os.close(fd)
                raise RuntimeError("the iterator that this worker belongs to is closed")
            self._adopt(fd)
            self._route = route
        assert self._fd is not None
        return self._fd

    def reserve(self, offset: int, nbytes: int, what: str) -> None:
        """Gives a part of the file its memory, so that touching it cannot fail later.

        Args:
            offset: Where the part begins.
            nbytes: Its length.
            what: What it is for, in the message.

        Raises:
            MemoryError: Where there is too little.
        """
        available = available_bytes()
        if available is not None and nbytes > available:  # The kernel would kill somebody instead.
            raise MemoryError(_too_little(what, nbytes, f"{available} bytes are available"))
        try:
            os.posix_fallocate(self.fd(), offset, nbytes)
        except OSError as e:
            raise MemoryError(_too_little(what, nbytes, e.strerror or str(e))) from e

    def free(self, offset: int, nbytes: int) -> None:
        """Takes the memory of a part away; what is mapped there reads as zeros afterwards."""
        _libc.fallocate(self.fd(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))

    def close(self) -> None:
        """Closes the descriptor; what is mapped stays."""
        self._finalizer()
        self._fd = None  # Its number may soon be another file's.


def _too_little(what: str, nbytes: int, there: str) -> str:
    return f"{what} need {nbytes} bytes of shared memory: {there}. Use smaller batches, fewer workers or prefetch less"


def _close_in(pid: int, fd: int) -> None:
    if os.getpid() == pid:  # A forked child's is its parent's number for another file, perhaps.
        os.close(fd)


def available_bytes() -> int | None:
    """What the machine, and the control group that this process is in, can still give; None where unknown."""
    found: list[int] = []
    try:
        with open("/proc/meminfo") as lines:
            found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for root, limit, usage in _CGROUPS:
        for directory in _groups(root):
            try:
                free = int((directory / limit).read_text()) - int((directory / usage).read_text())
                found.append(free + _file_cache_bytes(directory / "memory.stat"))
            except (OSError, ValueError):  # Another version, or "max".
                pass
    return max(0, min(found)) if found else None


def _groups(root: Path) -> set[Path]:
    """The control group that this process is in, and those that it is in, up to `root`."""
    found = {root}
    try:
        for line in _OWN_GROUPS.read_text().splitlines():  # "0::/path" or "9:memory:/path"
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                own = root / path.lstrip("/")
                found |= {own, *(p for p in own.parents if p.is_relative_to(root))}
    except (OSError, ValueError):
        pass
    return found


def _file_cache_bytes(path: Path) -> int:
    """What a control group is charged for cached files, which the kernel drops before it refuses anything."""
    stat = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
    # A group of version 1 tells that of the groups below it apart, in the totals.
    return sum(int(stat.get(f"total_{key}", stat.get(key, 0))) for key in ("inactive_file", "active_file"))
