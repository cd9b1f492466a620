"""The kinds of argument that the subcommands share: each parses a text, and says what it must be."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def size(least: int, multiple: int = 4) -> Callable[[str], int]:
    """Bytes, a multiple of `multiple` and not below `least`, with or without a unit."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].lower() not in UNITS:
            raise argparse.ArgumentTypeError(f"must be a size such as 4096, 64KiB or 1MiB, got {text!r}")
        nbytes = int(match[1]) * UNITS[match[2].lower()]
        if nbytes < least or nbytes % multiple:
            raise argparse.ArgumentTypeError(
                f"must be at least {least} bytes and a multiple of {multiple}, got {text!r}"
            )
        return nbytes

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An integer not below `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def new_file(*suffixes: str) -> Callable[[str], Path]:
    """A file that can be written, its name ending with one of `suffixes`."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"must end with {' or '.join(suffixes)}, got {text!r}")
        there = path.exists()
        try:
            # Permissions alone do not tell: a file system may be read-only.
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as e:
            raise argparse.ArgumentTypeError(f"must be a file that can be written: {e.strerror}: {text!r}") from None
        return path

    return parse
