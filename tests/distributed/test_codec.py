"""Values that ranks send each other arrive unchanged, and forged bytes run no code."""

from __future__ import annotations

import enum
import json
import math
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shoal.checkpoint.state_tree import DTYPES
from shoal.distributed import codec, objects
from shoal.distributed.codec import CodecError
from shoal.util.errors import AgreementError, CheckpointError, ShoalError


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any = 2


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


@dataclass
class Derived:
    given: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.given


@dataclass
class Loud:
    """Code that must not run when a value is read."""

    path: Path

    def __post_init__(self) -> None:
        self.path.touch()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        Path(self.path).touch()

    def __setstate__(self, state: Any) -> None:
        self.path.touch()


class Plain:
    pass


class Flags(enum.Flag):
    A = 1
    B = 2


PLAIN: list[Any] = [
    *(None, True, 0, -1, 2**62, 2**63, -(2**200), 10**6000, "", "text", "\ud800\n\x00é", 0.1, -0.0),
    *(math.inf, -math.inf, 1e-320, 1 + 2j, b"", b"\x80\x04", bytearray(b"ab"), Path("a/b")),
    *((), (1,), [1, (2, [3])], {}, {"a": 1}, {1: "a", (1, 2): "b", None: 0, False: []}, {"map": 1}),
    *({1, 2}, frozenset({"a"}), set(), Counter("aab"), OrderedDict(b=1, a=2)),
    *(defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2})),
    *(
        Colour.RED,
        Number.ONE,
        Flags.A,
        Pair(1),
        Pair([1], (2,)),
        Slotted({"a": Slotted(1)}),
        Derived(3),
    ),
    *(torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")),
    *(torch.strided, torch.preserve_format),
    *(np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("a"), np.datetime64("2026-01-02")),
]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_value_and_its_type_arrive(value: Any) -> None:
    assert same(codec.loads(codec.dumps(value)), value)
    nested = {"in": [value, (value,)]}
    assert same(codec.loads(codec.dumps(nested)), nested)


def test_values_that_are_not_compared_arrive() -> None:
    assert codec.loads(codec.dumps(defaultdict(list)))["new"] == []
    assert math.isnan(codec.loads(codec.dumps(math.nan)))
    error = CheckpointError(given="a", found="b", fix="c")
    error.where = "rank 1"
    found = codec.loads(codec.dumps(error))
    assert type(found) is CheckpointError
    assert str(found) == str(error)
    # Dataclasses of torch's, of which some have an `__init__` and a `__getstate__` of their own.
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2, 3)}, None, True)
    plan = planner.create_local_plan()
    assert codec.loads(codec.dumps(plan)) == plan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_arrive_bit_by_bit(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (2, 0), (1,), (3, 2)):
        size = math.prod(shape) * dtype.itemsize
        raw = random.Random(0).randbytes(size) if dtype != torch.bool else b"\1" * size
        content = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
        tensor = content.view(dtype).reshape(shape)
        found = codec.loads(codec.dumps([tensor, 1]))[0]
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert found.reshape(-1).view(torch.uint8).tolist() == list(raw)


def test_tensors_with_other_strides_arrive() -> None:
    whole = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    conjugate = torch.view_as_complex(whole.reshape(3, 2)).conj()
    for tensor in (whole.T, whole[:, 1], whole[:1, 2], conjugate):
        assert torch.equal(codec.loads(codec.dumps(tensor)), tensor)
    parameter = nn.Parameter(torch.ones(2))
    found = codec.loads(codec.dumps(parameter * 1))
    assert torch.equal(found, torch.ones(2))
    assert not found.requires_grad
    with torch.device("meta"):  # another default device
        for shape in ((3,), (0, 2)):
            found = codec.loads(codec.dumps(torch.ones(shape, device="cpu")))
            assert (found.device.type, found.shape) == ("cpu", shape)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array(1.5),
        np.array([], dtype=np.float16),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["a", "bc"]),
    ],
)
def test_arrays_arrive(array: np.ndarray[Any, Any]) -> None:
    found = codec.loads(codec.dumps(array))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def not_sent() -> list[tuple[Any, str]]:
    """Values with what an error says of them."""

    class Local(NamedTuple):
        value: int

    more = Derived(1)
    itself: list[Any] = []
    more.extra = 1  # type: ignore[attr-defined]
    itself.append(itself)
    return [
        (Plain(), "test_codec.Plain"),
        ([{"a": lambda: 0}], "function"),
        (Local(1), "Local"),
        (type("Inner", (ShoalError,), {})(given="", found="", fix=""), "Inner"),
        (np.array([object()]), "array of objects"),
        (torch.ones(2).to_sparse(), "Tensor"),
        (ValueError("x"), "ValueError"),
        (int, "type"),
        (more, "attributes"),
        (itself, "."),
        (Flags.A | Flags.B, "Flags.*no name"),
    ]


@pytest.mark.parametrize(("value", "named"), not_sent(), ids=lambda value: type(value).__name__)
def test_what_can_not_be_written_is_named(value: Any, named: str) -> None:
    with pytest.raises(CodecError, match=named):
        codec.dumps(value)


def forged(tree: object, content: bytes = b"") -> bytes:
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "big") + text + content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 8,
        codec.dumps(torch.ones(3))[:-1],
        (5000).to_bytes(8, "big") + b"[" * 5000,
        *map(
            forged,
            [
                {},
                {"a": 1, "b": 2},
                {"unknown": 1},
                {"int": "9" * 10 + "x"},
                {"int": 5},
                {"set": [[]]},
                {"dict": [[{"dict": []}, 1]]},
                {"tensor": ["float32", [2], 4]},
                {"tensor": ["float32", [-2], 8]},
                {"tensor": ["load", [1], 0]},
                {"bytes": [-1]},
                {"bytes": [1 << 60]},
                {"array": [0]},
                {"dtype": "load"},
                {"dtype": "strided"},
                {"defaultdict": ["eval", []]},
                {"enum": ["os", "system", "x"]},
                {"error": ["builtins", "SystemExit", "", "", "", None]},
                {"object": ["os", "system", ["true"]]},
                {"object": ["os", "environ.clear", []]},
                {"object": ["subprocess", "Popen", [["true"]]]},
                {"object": ["test_codec", "Plain", []]},
                {"object": ["test_codec", "Pair", [1]]},
                {"object": ["no.such.module", "A", []]},
                {"object": [1, 2, []]},
            ],
        ),
    ],
)
def test_forged_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        codec.loads(data)


def test_reading_calls_no_method_of_a_class(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    tree = {"object": [Loud.__module__, "Loud", [{"path": str(marker)}]]}
    assert codec.loads(forged(tree)).path == marker
    assert not marker.exists()


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_an_error(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Hostile(tmp_path / "ran"), protocol)
        array = len(data).to_bytes(8, "big")
        for forgery in (data, array + data, forged({"array": [len(data)]}, data)):
            with pytest.raises(CodecError):
                codec.loads(forgery)
            with pytest.raises(AgreementError, match="Other users"):
                objects.decode(b"\0" + forgery, 1)
    assert not (tmp_path / "ran").exists()


def test_noise_is_an_error_or_a_value() -> None:
    """Whatever is changed in the bytes, reading ends, and with no other exception."""
    draw = random.Random(0)
    good = codec.dumps({"a": [torch.ones(2), Pair(1), b"x"], "b": Colour.RED, 3: np.ones(2)})
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with suppress(CodecError):
            codec.loads(bytes(data[: draw.randint(0, len(data))]))
