"""Ragged text that every machine has: the functions of Python's own standard library, in batches of similar length."""

import ast
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_LENGTH = 1024
"""Bytes of the longest text; a longer function is cut at the last line that fits."""

WINDOW = 8
"""Batches whose functions are sorted by length together, as data loaders do to keep the padding low."""


def functions(path: Path) -> Iterator[bytes]:
    """Yields the outermost functions and methods of a source file, dedented, as UTF-8.

    Args:
        path: A Python file.

    Yields:
        Texts of 1 to `MAX_LENGTH` bytes.
    """
    with tokenize.open(path) as file:  # Honours the file's own encoding.
        source = file.read()
    lines = source.split("\n")  # As ast counts lines; splitlines() would also split at form feeds.
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield cut(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).encode())
        else:
            nodes.extend(reversed([*ast.iter_child_nodes(node)]))


def cut(text: bytes) -> bytes:
    """Returns what fits into `MAX_LENGTH` bytes: whole lines, or the bytes alone where not even the first line fits."""
    if len(text) <= MAX_LENGTH:
        return text
    return text[: text.rfind(b"\n", 0, MAX_LENGTH) + 1 or MAX_LENGTH]


def sample(count: int, seed: int) -> list[bytes]:
    """Returns functions in random order, every one once before any comes again.

    Args:
        count: How many.
        seed: The same seed and Python give the same texts.

    Raises:
        FileNotFoundError: Where this Python came without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(root.glob("*.py"))
    chance = random.Random(seed)
    chance.shuffle(modules)
    texts: list[bytes] = []
    for module in modules:
        texts.extend(functions(module))
        if len(texts) >= count:
            break
    if not texts:
        raise FileNotFoundError(f"no Python source in {root}: the demo reads the functions of the standard library")
    drawn: list[bytes] = []
    while len(drawn) < count:
        chance.shuffle(texts)
        drawn += texts
    return drawn[:count]


def batches(steps: int, batch_size: int, seed: int) -> list[Sequence[bytes]]:
    """Returns `steps` batches of `batch_size` functions each, of similar length within a batch, in random order.

    Args:
        steps: How many batches.
        batch_size: Functions in each.
        seed: Makes them reproducible.
    """
    texts = sample(steps * batch_size, seed)
    chance = random.Random(seed)
    result: list[Sequence[bytes]] = []
    for window in _chunks(texts, WINDOW * batch_size):
        cut_up = _chunks(sorted(window, key=len), batch_size)
        chance.shuffle(cut_up)
        result += cut_up
    return result


def _chunks(texts: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]
