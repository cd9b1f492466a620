"""Where in the caller's code we are."""

import sys

_PACKAGES = ("arenax", "arenax_adapters", "arenax_stress", "contextlib")


def call_site() -> str:
    """Returns ``file:line`` of the innermost frame outside of arenax.

    Example:
        >>> from arenax._call_site import call_site
        >>> exec(compile("print(call_site())", "train.py", "exec"), {"call_site": call_site})
        train.py:1
    """
    filename, line = caller()
    return f"{filename}:{line}"


def caller() -> tuple[str, int]:
    """Returns the file and the line of the innermost frame outside of arenax."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
