"""What goes into a checkpoint comes out of it: the same types, the same values."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

from helpers.checkpoint_files import Alone
from shoal.checkpoint import Checkpoints, RestoredCheckpoint, compare_names, shapes
from shoal.checkpoint.state_tree import DTYPES, names_in, put_together, take_apart
from shoal.util.errors import CheckpointError


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, down to the bits and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(x) is type(y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
    return bool(a == b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        return real.resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return raw(a) == raw(b)


def through_json(tree: Any) -> Any:
    parts = take_apart(tree)
    return put_together(json.loads(json.dumps(parts.json, allow_nan=False)), parts.tensors)


def through_disk(directory: Path, state: dict[str, Any], **template: Any) -> RestoredCheckpoint:
    checkpoints = Checkpoints(directory, Alone())
    checkpoints.save(1, state, {}, {})
    loaded = checkpoints.restore(template or None)
    assert loaded is not None
    return loaded


keys = some.text() | some.integers()
plain = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(some.characters(exclude_categories=[]))
    | some.binary()
)
trees = some.recursive(
    plain,
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(keys, inner)
        | some.dictionaries(keys, inner).map(OrderedDict)
    ),
)


@given(trees)
@settings(deadline=None)
def test_plain_values_come_back(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_awkward_values_come_back() -> None:
    numbers = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e22, 2**53, -(2**53) - 1, 10**6000]
    texts = ["\ud800 \x00 é", b"\x00\xff"]
    trees = [{"tensor": "x"}, {"dict": {"tuple": [1]}}, {1: "a", "1": "b"}, Counter({3: 2}), ()]
    for value in (*numbers, *texts, *trees, [(), [], {}]):
        assert same(through_json(value), value), repr(value)[:50]


def test_random_states_continue() -> None:
    python, numpy, generator = random.Random(1), np.random.RandomState(2), np.random.default_rng(3)
    numpy.standard_normal()
    tree = {
        "python": python.getstate(),
        "numpy": numpy.get_state(),
        "generator": generator.bit_generator.state,
    }
    restored = through_json(tree)
    expected = (python.random(), numpy.standard_normal(3).tolist(), generator.integers(0, 10**9))
    python.setstate(restored["python"])
    numpy.set_state(restored["numpy"])
    generator.bit_generator.state = restored["generator"]
    again = (python.random(), numpy.standard_normal(3).tolist(), generator.integers(0, 10**9))
    assert again == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    values = raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)
    cube = values[:24].reshape(2, 3, 4)
    state = {
        "cube": cube,
        "point": cube[1, 2, 3],
        "none": cube[:0],
        "turned": cube.permute(2, 0, 1),
        "strided": cube[:, ::2, 1:],
        "repeated": cube[:1].expand(3, 3, 4),
    }
    loaded = through_disk(tmp_path, state)
    assert same(loaded.state, state)


def test_odd_bits_and_views_that_hide_an_operation_come_back(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": number.conj(), "negative": number.conj().imag}
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 1], dtype=torch.int32)
    state |= {"float": bits.view(torch.float32), "inf": torch.tensor([math.inf, -0.0])}
    loaded = through_disk(tmp_path, state)
    assert same(loaded.state, state)
    assert torch.equal(loaded.state["conjugate"], torch.tensor([1 - 2j, 3 + 4j]))
    assert loaded.state["negative"].tolist() == [-2, 4]


def test_numpy_comes_back(tmp_path: Path) -> None:
    square = np.arange(6, dtype=np.uint32).reshape(2, 3)
    state = {
        "array": square,
        "fortran": np.asfortranarray(square),
        "backwards": square[::-1, ::-1],
        "point": np.array(2.5),
        "empty": np.empty((0, 2), dtype=np.complex128),
        "scalars": (np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1 - 1j)),
    }
    loaded = through_disk(tmp_path, state)
    assert same(loaded.state, state)
    loaded.state["array"][0, 0] = 7


def test_tied_weights_come_back_tied_by_value(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    state = {"model": model.state_dict(), "rows": model.embedding.weight[1:3]}
    loaded = through_disk(tmp_path, state)
    other.load_state_dict(loaded.state["model"])
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(loaded.state["rows"], model.embedding.weight[1:3])


def test_an_optimizer_continues_bit_equal(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()

    def build() -> tuple[nn.Linear, torch.optim.AdamW, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    one, other = build(), build()
    train(*one)
    loaded = through_disk(tmp_path, {str(i): part.state_dict() for i, part in enumerate(one)})
    for i, part in enumerate(other):
        part.load_state_dict(loaded.state[str(i)])
    for _ in range(4):
        train(*one)
        train(*other)
    assert same(other[0].state_dict(), one[0].state_dict())
    assert same(other[1].state_dict(), one[1].state_dict())


Pair = namedtuple("Pair", "a b")


class Text(str):
    """A str that would come back as another type."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({1, 2}, "type builtins.set"),
        (object(), "type builtins.object"),
        (Pair(1, 2), "Pair"),
        (Text("x"), "Text"),
        (print, "builtin_function"),
        (torch.float32, "torch.dtype"),
        (Path("x"), "Path"),
        ({(1, 2): 3}, "a key (1, 2) of type tuple"),
        ({None: 3}, "a key None"),
        ({True: 3}, "a key True of type bool"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.empty(2, dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        (np.array(["x"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.ones(2, dtype=">f4"), "dtype >f4"),
        ({0: torch.ones(1), "0": torch.ones(1)}, "keys that differ only in type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_stored_is_refused_before_writing(
    value: Any, found: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, Alone())
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(1, {"part": [1, {"it": value}]}, {}, {})
    assert "state/part/1/it" in caught.value.given
    assert found in caught.value.found
    with pytest.raises(CheckpointError, match="rank/0/it"):
        checkpoints.save(1, {}, {"it": value}, {})
    for plain in (value, torch.ones(1)):
        with pytest.raises(CheckpointError, match="info/it"):
            checkpoints.save(1, {}, {}, {"it": plain})
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(CheckpointError, match="contains itself"):
        take_apart(tree)


def test_json_that_makes_no_sense() -> None:
    for content in ({"no-such": 1}, {"int": 1, "float": 2}, {}, {"tensor": "absent"}, {"bytes": "%"}):
        with pytest.raises(CheckpointError, match="can't be decoded"):
            put_together([content], {})


def test_names_are_paths(tmp_path: Path) -> None:
    one = torch.ones(1)
    tree = {"a/b": [one, {"c#~": one}], 7: (one,), "": one}
    names = {"a~1b/0", "a~1b/1/c~2~0", "7/0", ""}
    parts = take_apart(tree)
    assert set(parts.tensors) == names_in(parts.json) == names
    assert same(through_disk(tmp_path, {"tree": tree}).state, {"tree": tree})


def test_any_reader_of_safetensors_reads_the_files(tmp_path: Path) -> None:
    state = {"wide": torch.ones(3, dtype=torch.float64), "flag": torch.tensor([True])}
    assert through_disk(tmp_path, state).path == tmp_path / "step-1"
    content = safetensors.torch.load_file(tmp_path / "step-1" / "rank-0.safetensors")
    assert same(content["state/wide"], state["wide"])
    assert same(content["state/flag"], state["flag"])


def test_a_template_is_filled_in_place(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}}
    weight = torch.zeros(3, 2, dtype=torch.float64).T
    other_shape = torch.zeros(5)
    template = {"weight": weight, "bias": other_shape, "extra": torch.zeros(1)}
    linear = nn.Linear(2, 2)
    state["parameter"] = {"it": torch.full((2, 2), 3.0)}
    loaded = through_disk(tmp_path, state, model=template, parameter={"it": linear.weight})
    assert linear.weight.tolist() == [[3, 3], [3, 3]]
    assert not loaded.state["parameter"]["it"].requires_grad
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded.state["model"]["weight"].data_ptr() == weight.data_ptr()
    assert other_shape.tolist() == [0] * 5
    assert torch.equal(loaded.state["model"]["bias"], torch.ones(2))
    assert set(loaded.state["model"]) == {"weight", "bias"}


def test_rank_state_of_another_world_is_not_given(tmp_path: Path) -> None:
    own = {"random": torch.arange(3), "count": 2}
    Checkpoints(tmp_path, Alone()).save(1, {"x": 1}, own, {})
    alone = Checkpoints(tmp_path, Alone()).restore()
    assert alone is not None
    assert same(alone.rank_state, own)
    two = Checkpoints(tmp_path, Alone(size=2)).restore()
    assert two is not None
    assert two.rank_state is None
    assert two.state == {"x": 1}


def test_differences_are_named() -> None:
    expected = shapes({"a": torch.ones(2, 3), "b": torch.ones(1), "c": torch.ones(()), "n": 1})
    assert expected == {"a": (2, 3), "b": (1,), "c": ()}
    assert compare_names(expected, dict(reversed(expected.items()))) is None
    difference = compare_names(expected, {"a": [3, 2], "d": [1], "e": [1]})
    assert difference is not None
    assert difference.missing == ("b", "c")
    assert difference.unexpected == ("d", "e")
    assert str(difference) == (
        "2 missing, the first: b; 2 unexpected, the first: d; "
        "1 of another shape, the first: a (expected (2, 3), found (3, 2))"
    )
