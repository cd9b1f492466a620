"""Whatever tree of whatever arrays a batch is: the same types, dtypes, shapes and bytes arrive, in a slot or not."""
# pyright: reportPrivateUsage=false

import collections
import datetime
import pickle
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arenax_adapters import _mapping
from arenax_adapters._tree import map_tree
from arenax_adapters.shared import Packed, Padded, Segment
from tests.adapters.worker_samples import Attributed, Point, Store

cloudpickle: Any = pytest.importorskip("cloudpickle")

RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,))])
REGISTERED = [
    np.dtype(t)
    for t in vars(ml_dtypes).values()
    if isinstance(t, type) and issubclass(t, np.generic) and t.__module__ == "ml_dtypes"
]
ARRAYS = {
    "strided": np.arange(20, dtype=np.int16)[::3],
    "reversed": np.arange(20, dtype=np.int16)[::-1],
    "broadcast": np.broadcast_to(np.float32(3), (4, 5)),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "0-d": np.array(2.5),
    "zero-size": np.zeros((0, 3), np.float32),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "longdouble": np.array([1, 2], np.longdouble),
    "byte-swapped": np.arange(5, dtype=">i4"),
    "datetime": np.array(["2020-01-02", "NaT"], "M8[ns]"),
    "timedelta": np.array([1, 2], "m8[s]"),
    "structured": np.zeros(3, RECORD),
    "record": np.zeros(3, RECORD).view(np.recarray),
    "void": np.array([b"ab", b"cd"], "V2"),
    "text": np.array(["abc", "d"]),
    "bytes": np.array([b"abc", b"d"]),
    "long text": np.array(["a" * 100, "b"], np.dtypes.StringDType()),
    "objects": np.array([{"a": 1}, None], object),
    **{d.name: np.array([0, 1, 1], d) for d in REGISTERED},
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def through(tree: Any, first: bool = True, slots: int = 1, held: bool = False) -> Packed:
    """Sends a tree as the first batch or a later one, or where all slots are held."""
    segment = Segment(1, slots)
    writer = cloudpickle.loads(cloudpickle.dumps(segment.writer()))
    before = [] if first else [pickle.loads(pickle.dumps(writer.pack(np.zeros(10_000, np.uint8))))]
    if not held:
        before.clear()
    received = pickle.loads(pickle.dumps(writer.pack(tree, "note")))
    segment.close()
    assert received.note == "note"
    return received


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.dtype.hasobject or a.dtype.kind == "T" or a.tobytes() == b.tobytes()
        assert str(a) == str(b)


def test_every_registered_dtype_is_there():
    assert {"bfloat16", "int4", "float8_e5m2", "float8_e4m3fn"} <= {d.name for d in REGISTERED}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("how", ["first", "later", "held"])
def test_arrays(name: str, how: str):
    array = ARRAYS[name]
    original = array.copy()
    received = through({"a": array, "b": [array]}, first=how == "first", held=how == "held")
    slotless = not array.nbytes or array.dtype.hasobject or array.dtype.kind in "SUT" or array.dtype.type is np.void
    slotless |= isinstance(array, np.recarray)
    assert received.overflowed == (how == "held" and not slotless)
    expected = array if slotless else np.asarray(original)
    if received.overflowed and name == "byte-swapped":
        expected = expected.astype("=i4")  # NumPy's own pickles, below protocol 5, are in native order.
    for found in (received.tree["a"], received.tree["b"][0]):
        assert_same(found, expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "tree", [{}, None, "text", (), {"a": ["x", 1, None]}, np.float32(2), datetime.date(2020, 1, 1)]
)
def test_trees_without_arrays_need_no_slot(tree: Any, first: bool):
    """Also where all are held, it is no overflow."""
    received = through(tree, first)
    assert type(received.tree) is type(tree)
    assert received.tree == tree
    assert not received.overflowed
    assert not through(tree, first=False, held=True).overflowed


def test_containers():
    tree: Any = {
        "point": Point(np.arange(3), (np.arange(2), [np.ones(1), ()])),
        "ordered": collections.OrderedDict(b=np.zeros(2), a=1),
        "default": collections.defaultdict(list, a=np.ones(2)),
        "user": collections.UserDict(a=np.ones(2)),
        "attributed": Attributed("kept", a=np.ones(2)),
        "store": Store({"a": np.ones(2)}),
        3: np.arange(3),
        "same": [np.ones(3)] * 2,
    }
    types_of = map_tree(type, tree)
    received = through(tree).tree
    assert map_tree(type, received) == types_of
    assert map_tree(type, tree) == types_of  # What was sent is as it was.
    assert [list(tree), list(tree["ordered"])] == [list(received), list(received["ordered"])]
    assert received["default"].default_factory is list
    assert received["attributed"].note == "kept"
    assert received["point"].y[0].tolist() == [0, 1]
    assert received["store"]["a"].tolist() == tree["store"]["a"].tolist() == [1, 1]
    assert [x.tolist() for x in received["same"]] == [[1, 1, 1]] * 2


def test_a_mapping_without_copies():
    proxy = types.MappingProxyType({"a": 1})
    assert map_tree(lambda x: x + 1, proxy) == {"a": 2}
    assert type(map_tree(lambda x: x, proxy)) is types.MappingProxyType


def test_read_only_arrays():
    array = read_only(np.arange(5))
    received = through([array]).tree[0]
    assert received.tolist() == array.tolist()
    assert not np.shares_memory(received, array)


def test_a_masked_array_keeps_its_mask():
    received = through(np.ma.array([1, 2, 3], mask=[False, True, False])).tree
    assert received.tolist() == [1, None, 3]


def test_padded_leaves():
    bits = np.array([1, 2, 3, 0], ml_dtypes.bfloat16)
    tree = [
        Padded(bits.view(np.int16), "bfloat16", 0, 3),
        Padded(bits.view(np.int16), "bfloat16"),
        Padded(np.arange(6).reshape(2, 3), None, 1, 2),
        Padded(np.zeros((0, 4)), None, 0, 0),
    ]
    for held in (False, True):
        ragged, plain, rows, none = through(tree, first=False, held=held).tree
        assert ragged.valid().tolist() == [1, 2, 3]
        assert (ragged.array.dtype, ragged.axis, ragged.extent) == (ml_dtypes.bfloat16, 0, 3)
        assert plain.tolist() == bits.tolist()
        assert rows.valid().tolist() == [[0, 1], [3, 4]]
        assert none.valid().shape == (0, 4)


def test_received_after_the_segment_is_closed():
    segment = Segment(1, 2)
    writer = segment.writer()
    early = pickle.loads(pickle.dumps(writer.pack(np.arange(10))))
    late = pickle.dumps(writer.pack(np.arange(10)))
    segment.close()
    segment.close()
    assert early.tree.tolist() == list(range(10))
    early.release()
    pickle.loads(late).release()


def test_a_closed_segment_maps_nothing_new():
    """The number of its descriptor may be another file's."""
    segment = Segment(1, 2)
    file = segment._file
    assert file is not None
    number = file.fd()
    segment.close()
    with open("/proc/self/stat") as other:
        assert other.fileno() != number or file._fd != number
        with pytest.raises(RuntimeError, match=r"closed|gone"):
            file.fd()


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_are_no_used_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int):
    """A control group that has read many files is at its limit, and has memory all the same."""
    prefix = {1: "total_", 2: ""}[version]
    (tmp_path / "limit").write_text("10000000\n")
    (tmp_path / "usage").write_text("9000000\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file 3000000\n{prefix}active_file 500000\n")
    monkeypatch.setattr(_mapping, "_CGROUPS", ((tmp_path, "limit", "usage"),))
    assert _mapping.available_bytes() == 4_500_000
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, text in (("limit", "4000000\n"), ("usage", "3000000\n"), ("memory.stat", "anon 5\n")):
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "own").write_text("1:cpu:/\n0::/job/step\n")
    monkeypatch.setattr(_mapping, "_OWN_GROUPS", tmp_path / "own")
    assert _mapping.available_bytes() == 1_000_000  # Of a group that its own is in.
    (tmp_path / "job" / "limit").write_text("max\n")
    (tmp_path / "limit").write_text("max\n")
    available = _mapping.available_bytes()
    assert available is None or available > 4_500_000
