"""Where in the caller's code we are."""

import sys
import threading

# Theirs is no line of the caller's; `threading` is what a thread of an adapter begins in.
_PACKAGES = ("arenax", "arenax_adapters", "arenax_stress", "contextlib", "threading")


class _Thread(threading.local):
    """What a thread of our own knows of its user: the file and the line, or None."""

    site: tuple[str, int] | None = None


_this_thread = _Thread()


def call_site() -> str:
    """Returns ``file:line`` of the innermost frame outside of arenax.

    Example:
        >>> from arenax._call_site import call_site
        >>> exec(compile("print(call_site())", "train.py", "exec"), {"call_site": call_site})
        train.py:1
    """
    filename, line = caller()
    return f"{filename}:{line}"


def caller(libraries: tuple[str, ...] = ()) -> tuple[str, int]:
    """Returns the file and the line of the innermost frame outside of arenax, or else whom the thread works for.

    Args:
        libraries: Packages whose frames are passed over too.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_globals.get("__name__", "").partition(".")[0] in (*_PACKAGES, *libraries):
        if frame.f_back is None:
            if _this_thread.site is not None:
                return _this_thread.site
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def work_for(site: tuple[str, int]) -> None:
    """Names the line that this thread works for, until it ends: what to blame where no frame of the user's is below."""
    _this_thread.site = site
