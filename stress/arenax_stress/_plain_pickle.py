"""Reads pickles of plain data and of nothing else: no name in the file is looked up, so that none of its code can run.

Python's own unpickler with a `find_class` that refuses is not enough. It hashes whatever a file makes a key of, and a
file of a few hundred bytes can give it a tuple that takes forever, or a deep one that overflows the stack of C.
"""

import pickle
import pickletools
import struct
from typing import Any

# What may be a key: nothing whose hash looks at other objects.
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})


def loads(data: bytes) -> Any:
    """Returns what a pickle holds: dicts, lists, tuples, numbers, texts, bytes, bools and None.

    Args:
        data: A pickle of protocol 2 or later; what comes after its end is not looked at.

    Raises:
        pickle.UnpicklingError: For anything else that is in it, by its name, and for bytes that are no pickle.

    Example:
        >>> import pickle
        >>> from arenax_stress._plain_pickle import loads
        >>> loads(pickle.dumps({"size": 512, "frames": [("train.py", 7)]}))
        {'size': 512, 'frames': [('train.py', 7)]}
        >>> loads(pickle.dumps(print))
        Traceback (most recent call last):
            ...
        _pickle.UnpicklingError: holds more than plain data: builtins.print
    """
    if data[:1] != b"\x80":
        raise pickle.UnpicklingError("is no pickle of protocol 2 or later")
    reader = _Reader(data)
    try:
        return reader.read()
    except (IndexError, struct.error):
        # A slice that reaches beyond the end is short, and the next operation is not there.
        if reader.position >= len(data):
            raise pickle.UnpicklingError(f"ends after {len(data):,} bytes, before the pickle does") from None
        raise pickle.UnpicklingError(f"is no pickle: byte {reader.position:,} takes what is not there") from None
    except (KeyError, ValueError) as e:
        raise pickle.UnpicklingError(f"is no pickle: byte {reader.position:,}: {type(e).__name__}") from None


class _Reader:
    """The machine that a pickle is a program for, with the operations alone that plain data needs."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 2  # after the protocol

    def read(self) -> Any:
        """Returns the object. It is all one loop, frequent operations first: calls would double its time."""
        data, position = self.data, self.position
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}
        try:
            while True:
                operation = data[position]
                position += 1
                if operation == 0x68:  # BINGET
                    stack.append(memo[data[position]])
                    position += 1
                elif operation == 0x6A:  # LONG_BINGET
                    stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                    position += 4
                elif operation == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif operation == 0x4B:  # BININT1
                    stack.append(data[position])
                    position += 1
                elif operation == 0x4D:  # BININT2
                    stack.append(int.from_bytes(data[position : position + 2], "little"))
                    position += 2
                elif operation == 0x4A:  # BININT
                    stack.append(int.from_bytes(data[position : position + 4], "little", signed=True))
                    position += 4
                elif operation == 0x8A:  # LONG1
                    size = data[position]
                    position += 1 + size
                    stack.append(int.from_bytes(data[position - size : position], "little", signed=True))
                elif operation == 0x28:  # MARK
                    marks.append(len(stack))
                elif operation == 0x75:  # SETITEMS
                    mark = marks.pop()
                    items = stack[mark:]
                    del stack[mark:]
                    _set(stack[-1], items[::2], items[1::2])
                elif operation == 0x65:  # APPENDS
                    mark = marks.pop()
                    items = stack[mark:]
                    del stack[mark:]
                    _list(stack[-1]).extend(items)
                elif operation == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif operation == 0x5D:  # EMPTY_LIST
                    stack.append([])
                elif operation == 0x8C:  # SHORT_BINUNICODE
                    size = data[position]
                    position += 1 + size
                    stack.append(str(data[position - size : position], "utf-8", "surrogatepass"))
                elif operation in _TUPLES:
                    size = _TUPLES[operation]
                    if size > len(stack):
                        raise IndexError
                    items = stack[len(stack) - size :]
                    del stack[len(stack) - size :]
                    stack.append(tuple(items))
                elif operation == 0x74:  # TUPLE
                    mark = marks.pop()
                    items = stack[mark:]
                    del stack[mark:]
                    stack.append(tuple(items))
                elif operation in _CONSTANTS:
                    stack.append(_CONSTANTS[operation])
                elif operation in _SIZED:
                    width, convert = _SIZED[operation]
                    size = int.from_bytes(data[position : position + width], "little")
                    position += width + size
                    stack.append(convert(data[position - size : position]))
                elif operation == 0x47:  # BINFLOAT
                    position += 8
                    stack.append(struct.unpack_from(">d", data, position - 8)[0])
                elif operation == 0x71:  # BINPUT
                    memo[data[position]] = stack[-1]
                    position += 1
                elif operation == 0x72:  # LONG_BINPUT
                    memo[int.from_bytes(data[position : position + 4], "little")] = stack[-1]
                    position += 4
                elif operation == 0x73:  # SETITEM
                    value, key = stack.pop(), stack.pop()
                    _set(stack[-1], [key], [value])
                elif operation == 0x61:  # APPEND
                    item = stack.pop()
                    _list(stack[-1]).append(item)
                elif operation == 0x95:  # FRAME: its size helps who reads a stream
                    position += 8
                elif operation == 0x2E:  # STOP
                    return stack.pop()
                else:
                    _refuse(operation, data[position : position + 200], stack)
        finally:
            self.position = position


_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


# Bytes of the size, and what is made of that many bytes: BINUNICODE and its long form, three of bytes, LONG4.
_SIZED: dict[int, tuple[int, Any]] = {
    0x58: (4, _text), 0x8D: (8, _text), 0x43: (1, bytes), 0x42: (4, bytes), 0x8E: (8, bytes), 0x8B: (4, _long),
}  # fmt: skip


def _set(target: Any, keys: list[Any], values: list[Any]) -> None:
    if type(target) is not dict:
        raise pickle.UnpicklingError(f"is no pickle: sets an item of {type(target).__name__}")
    strange = {*map(type, keys)} - _KEYS
    if strange:
        names = ", ".join(sorted(kind.__name__ for kind in strange))
        raise pickle.UnpicklingError(f"holds more than plain data: a key of type {names}")
    target.update(zip(keys, values, strict=True))


def _list(target: Any) -> list[Any]:
    if type(target) is not list:
        raise pickle.UnpicklingError(f"is no pickle: appends to {type(target).__name__}")
    return target


def _refuse(operation: int, following: bytes, stack: list[Any]) -> None:
    names = {known.code: known.name for known in pickletools.opcodes}
    name = names.get(chr(operation), f"operation {operation:#04x}")
    if name in ("GLOBAL", "INST"):
        name = ".".join(word.decode("utf-8", "replace") for word in following.split(b"\n")[:2])
    elif name == "STACK_GLOBAL" and len(stack) > 1:
        name = ".".join(word if isinstance(word, str) else type(word).__name__ for word in stack[-2:])
    raise pickle.UnpicklingError(f"holds more than plain data: {name[:100]}")
