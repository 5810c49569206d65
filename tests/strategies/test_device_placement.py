"""Models on several devices of one process, which are pretended: what moves, the numbers, refusals."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers import reference as specification
from helpers.fake_devices import Elsewhere, Move, Pretended, plain
from helpers.reference import TOLERANCE, Row, Trained, distance
from shoal.distributed.device import choose_device, neighbours
from shoal.strategies.multi_device import check_replicas
from shoal.util.errors import LaunchError, ShoalError, StepError

ZERO, ONE = torch.device("cpu", 0), torch.device("cpu", 1)
WIDTH, SAMPLES = 3, 10


@pytest.fixture
def world() -> Iterator[shoal.World]:
    with shoal.init(device="cpu", devices_per_rank=2) as alone:
        yield alone


@pytest.fixture
def devices(world: shoal.World) -> Iterator[Pretended]:
    """The two devices of the world are two."""
    assert world.devices == (torch.device("cpu"),) * 2
    world.devices = (ZERO, ONE)
    with Pretended() as mode:
        yield mode


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        added: Tensor = self.layer(x) * mask
        return x + added


class Net(nn.Module):
    """Blocks in a list, one of them called twice, which are given a mask by name."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"score": nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 2))})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = (x > 0).to(x.dtype)
        hidden = self.first(x) + self.shift
        self.seen += 1
        for block in (*self.blocks, self.blocks[2]):
            hidden = block(hidden, mask=mask)
        return {"score": self.heads["score"](hidden)}


def build(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.arange(SAMPLES) % 2


def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output["score"], batch[1], reduction="sum"), len(batch[1])


def hits(output: Any, target: Tensor) -> tuple[Tensor, int]:
    return (output["score"].argmax(-1) == target).sum(), len(target)


def trained(world: shoal.World, strategy: Any, model: nn.Module, micros: int = 2) -> Trained:
    """An epoch of batches of 8 and 2, then an evaluation, whose two numbers are the last losses."""
    model = shoal.parallelize(model, world, strategy, statistics="rank")
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss), clip=0.1)
    batches = shoal.Loader(data(), world, batch_size=8, micro_batches=micros).epochs(1)
    results = [step(batch) for batch in batches]
    evaluated = shoal.evaluate(step, data(), metrics={"hits": hits})
    return Trained(
        {name: plain(p).numpy().copy() for name, p in model.named_parameters()},
        [result.norm for result in results],
        [*(result.loss for result in results), evaluated["loss"], evaluated["hits"]],
    )


CASES = [
    *(("convolutional", 1, None), ("convolutional", 4, None)),
    *(("transformer", 1, None), ("transformer", 4, 3), ("transformer", 4, 1)),
]


@pytest.mark.full
@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("model", "micros", "ahead"), CASES)
def test_it_trains_like_one_process(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch, model: str, micros: int, ahead: int | None
) -> None:
    """Ragged batches, clipping; the transformer has a head that is its embedding."""
    monkeypatch.setattr(specification, "whole", plain)
    row = Row(model, 101, model == "transformer", micros, False, 0.5)
    found = specification.train(world, row, "", shoal.DevicePlacement(in_flight=ahead), 10)
    assert distance(found, specification.specification(row, 10)) < TOLERANCE


MAPS: dict[str, dict[str, Any]] = {
    "siblings": {"": 0, "blocks.1": 1, "blocks.2": 1, "heads": 1},
    "patterns": {"": 0, "blocks.*": 1, "heads.score": 1},
    "inside": {"": 0, "blocks.0.layer": 0, "heads.score.0": 1},
    "all on the other": {"": 1},
}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    "devices_of",
    [pytest.param(MAPS[name], marks=[] if name == "siblings" else pytest.mark.full) for name in MAPS],
    ids=[*MAPS],
)
def test_a_map_changes_no_number_and_no_name(world: shoal.World, devices_of: dict[str, Any]) -> None:
    """Containers, keywords, modules called twice, parameters and buffers of the model's own."""
    with shoal.init(device="cpu") as alone:
        expected = trained(alone, None, build())
    model = build()
    names = [*model.state_dict()]
    found = trained(world, shoal.DevicePlacement(devices_of), model)
    assert distance(found, expected) < TOLERANCE
    assert [*model.state_dict()] == names
    assert model.get_parameter("shift").device == world.devices[devices_of[""]]


def test_tensors_are_where_the_map_says(world: shoal.World, devices: Pretended) -> None:
    model = shoal.parallelize(build(), world, shoal.DevicePlacement(MAPS["siblings"]))
    found = {name: str(tensor.device) for name, tensor in model.state_dict().items()}
    assert {name for name, device in found.items() if device == "cpu:1"} == {
        *(f"blocks.{n}.layer.{what}" for n in (1, 2) for what in ("weight", "bias")),
        *("heads.score.1.weight", "heads.score.1.bias"),
    }
    assert found["seen"] == found["shift"] == "cpu:0"


def passes(moves: list[Move]) -> list[tuple[int | None, int | None, tuple[int, ...], str]]:
    return [(m.source, m.target, m.shape, "backward" if m.backward else "forward") for m in moves]


def test_what_moves_and_when(world: shoal.World, devices: Pretended) -> None:
    """Inputs to the first device, hidden state and mask to the second once, targets to the output."""
    strategy = shoal.DevicePlacement(MAPS["siblings"], in_flight=2)
    model = shoal.parallelize(build(), world, strategy, statistics="rank")
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    batches = shoal.Loader(data(), world, batch_size=8, micro_batches=4).epochs(2)
    step(next(batches))  # with the trial of the loss
    devices.moves.clear()
    for batch in batches:
        if batch.size == 8:
            step(batch)
            break
    here = [move for move in passes(devices.moves) if move[2]]  # and not numbers: the norm, the loss
    forward = [
        (None, 0, (2, WIDTH), "forward"),
        (0, 1, (2, WIDTH), "forward"),  # hidden state
        (0, 1, (2, WIDTH), "forward"),  # mask
        (None, 1, (2, WIDTH), "forward"),  # the micro-batch, where the output is
        (None, 1, (2,), "forward"),
    ]
    backward = [(1, 0, (2, WIDTH), "backward")]
    assert here == [*forward * 2, *backward * 2] * 2


def test_without_gradients_nothing_is_kept(world: shoal.World, devices: Pretended) -> None:
    model = shoal.parallelize(build(), world, shoal.DevicePlacement(MAPS["siblings"]))
    with torch.no_grad():
        outputs = [plain(model(data()[0])["score"]) for _ in range(2)]
    assert torch.equal(*outputs)
    assert not any(move.backward for move in devices.moves)
    with pytest.raises(TypeError):
        model()
    assert torch.equal(plain(model(data()[0])["score"]), outputs[0])


class Elder(nn.Module):
    """Placed by hand, as torch's tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4).to(ZERO)
        self.second = nn.Linear(4, 2).to(ONE)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"score": self.second(self.first(x.to(ZERO)).tanh().to(ONE))}


class Plain(Elder):
    """The same on one device."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"score": self.second(self.first(x).tanh())}


@pytest.mark.usefixtures("devices")
def test_a_model_placed_by_hand_stays_where_it_is(world: shoal.World) -> None:
    with shoal.init(device="cpu") as alone:
        expected = trained(alone, None, build(Plain))
    model = build(Elder)
    assert distance(trained(world, None, model), expected) < TOLERANCE
    assert [p.device for p in model.parameters()] == [ZERO, ZERO, ONE, ONE]


@pytest.mark.parametrize(
    "strategy", [shoal.FSDP(), shoal.LocalSGD(), shoal.TensorParallel(plan={"first": "head"})]
)
@pytest.mark.usefixtures("devices")
def test_what_wants_one_device_refuses_a_model_on_several(world: shoal.World, strategy: Any) -> None:
    with pytest.raises(StepError, match="placed manually on cpu:0, cpu:1"):
        shoal.parallelize(build(Elder), world, strategy)


def test_replicas_have_the_same_on_each_of_their_devices() -> None:
    with Pretended():
        model = build(Elder)

        def two(other: list[int]) -> Any:
            return SimpleNamespace(size=2, device=ZERO, gather=lambda own: [own, other])

        check_replicas(model, two([0, 0, 1, 1]))
        with pytest.raises(StepError, match=r"init\(devices_per_rank=2\)"):
            check_replicas(model, two([1, 1, 2, 2]))


class Adding(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        return {"score": self.heads["score"](hidden + self.blocks[1](hidden, mask=x))}


@pytest.mark.usefixtures("devices")
def test_adding_up_between_devices_is_explained(world: shoal.World) -> None:
    with pytest.raises(StepError, match="the forward of a Adding on cpu:0, cpu:1"):
        trained(world, shoal.DevicePlacement({"": 0, "blocks.1": 1}), build(Adding))


@pytest.mark.full
def test_a_copy_and_an_exported_program(world: shoal.World, tmp_path: Path) -> None:
    inputs = data()[0]
    model = shoal.parallelize(build(Plain), world, shoal.DevicePlacement({"first": 0, "second": 1}))
    expected = model(inputs)["score"]
    assert torch.equal(copy.deepcopy(model)(inputs)["score"], expected)
    path = shoal.export(model, tmp_path / "model.ts")
    assert torch.equal(torch.jit.load(path)(inputs)["score"], expected)
    path = shoal.export(model, tmp_path / "model.pt2", example=(inputs,))
    assert torch.equal(torch.export.load(path).module()(inputs)["score"], expected)
    assert len(model.get_submodule("first")._forward_pre_hooks) == 1


@pytest.mark.usefixtures("devices")
def test_a_copy_lives_on_the_same_devices(world: shoal.World) -> None:
    model = shoal.parallelize(build(), world, shoal.DevicePlacement(MAPS["siblings"]))
    with torch.no_grad():
        output = copy.deepcopy(model)(data()[0])["score"]
    assert isinstance(output, Elsewhere)
    assert output.number == 1


def test_balanced_by_memory_before_and_after_blocks(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
            self.head = nn.Linear(8, 8)

    model = Deep()
    world.devices = (torch.device("cpu"),) * 4
    shoal.parallelize(model, world, shoal.DevicePlacement())
    assert capsys.readouterr().out == (
        "shoal: shoal.DevicePlacement() puts on cpu first to blocks.0, 0.000549 MiB; on cpu blocks.1 "
        "to "
        "blocks.2, 0.000549 MiB; on cpu blocks.3 to blocks.4, 0.000549 MiB; on cpu blocks.5 to head, "
        "0.000549 MiB\n"
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    return model


def shared() -> nn.Module:
    model = nn.Module()
    model.one = model.other = nn.Linear(2, 2)
    return model


def test_what_is_tied_stays_together(world: shoal.World, capsys: pytest.CaptureFixture[str]) -> None:
    shoal.parallelize(tied(), world, shoal.DevicePlacement())
    assert "on cpu 0 and 3, " in capsys.readouterr().out


BAD: list[tuple[Any, Any, str]] = [
    (Net, {"": 0, "block.1": 1}, "matches 'block.1'.*'blocks.1'"),
    (Net, {"": 0, "zzz": 1}, "matches 'zzz'.*'first', 'blocks', 'heads'"),
    (Net, {"": 0, "heads": 2}, r"no device 2: this rank has 2.*devices_per_rank=3"),
    (Net, {"": 0, "heads": -1}, "no device -1"),
    (Net, {"": 0, "heads": True}, "not a device that holds values"),
    (Net, {"": 0, "heads": "gpu0"}, "gpu0"),
    (Net, {"": 0, "heads": "cuda:3"}, "no GPU 3: 0 visible"),
    (Net, {"": 0, "heads": "cpu:1"}, "the CPU is a single device"),
    (Net, {"": 0, "heads": "meta"}, "not a device that holds values"),
    (Net, {"": 0, "heads": None}, "not a device that holds values"),
    (
        Net,
        {"first": 0, "blocks": 1},
        r"no entry of the map covers shift, seen, heads.score.1.weight and 1",
    ),
    (Net, {"": 0, 1: 1}, "names of modules"),
    (Net, {"": 0, "blocks.*": 0, "blocks.1": 1}, "two entries of the map match 'blocks.1'"),
    (tied, {"0": 0, "2": 1, "3": 1}, "0.weight and 3.weight are one tensor"),
    (shared, {"one": 0, "other": 1}, "one and other are one module"),
    (shared, (0, 1), "2 devices, but only 1 part"),
    (Net, "cuda:0", "a str is neither"),
    (Net, 2, "a int is neither"),
    (Net, {}, "the device map is empty"),
    (Net, (0,), "one device"),
]


@pytest.mark.parametrize(("make", "given", "found"), BAD)
def test_bad_input_is_refused(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch, make: Any, given: Any, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StepError, match=f"(?s)given: .*DevicePlacement\\(.*{found}"):
        shoal.parallelize(make(), world, shoal.DevicePlacement(given))


@pytest.mark.parametrize("ahead", [0, -1, True, 1.5])
def test_micro_batches_in_flight_are_counted(ahead: Any) -> None:
    with pytest.raises(StepError, match="not a number of micro-batches"):
        shoal.DevicePlacement((0, 1), in_flight=ahead)


@pytest.mark.parametrize(
    ("strategies", "found"),
    [
        (
            [shoal.FSDP()],
            r"(?s)shoal.FSDP\(.*the model, or its shard, on a single device in each process",
        ),
        ([shoal.LocalSGD()], r"shoal.LocalSGD\("),
        ([shoal.TensorParallel(plan={"first": "head"})], r"shoal.TensorParallel\("),
        ([shoal.Pipeline(split_points=("heads",))], r"shoal.Pipeline\("),
        ([shoal.ContextParallel(check=False), shoal.DDP()], r"shoal.ContextParallel\("),
        ([shoal.DevicePlacement((0, 1)), shoal.DDP()], "would place the complete model"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    world: shoal.World, strategies: list[Any], found: str
) -> None:
    with pytest.raises(ShoalError, match=found):
        shoal.parallelize(build(), world, [shoal.DevicePlacement((0, 1)), *strategies])


@pytest.mark.parametrize("how", ["inductor", "script"])
def test_compiled_code_moves_nothing(world: shoal.World, how: str) -> None:
    model = shoal.parallelize(build(), world, shoal.DevicePlacement((0, 1)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters()), shoal.Task(loss), compile=how)
    with pytest.raises(StepError, match="compiled code"):
        step(next(shoal.Loader(data(), world, batch_size=4).epochs(1)))


def test_gpus_of_other_ranks_are_refused(world: shoal.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world.placement = dataclasses.replace(world.placement, size=2, local_size=2)
    with pytest.raises(StepError, match=r"(?s)cuda:1 does not belong to this rank.*devices_per_rank=2"):
        shoal.parallelize(build(), world, shoal.DevicePlacement({"": "cuda:1"}))


@pytest.mark.parametrize(
    ("visible", "local_rank", "given", "count", "first"),
    [
        (8, 0, None, 2, "cuda:0"),
        (8, 3, None, 2, "cuda:6"),
        (2, 3, None, 2, "cuda:0"),  # each task sees its own two
        (8, 1, "cuda:5", 3, "cuda:5"),
        (0, 3, None, 2, "cpu"),
    ],
)
def test_a_rank_has_neighbouring_devices(
    world: shoal.World,
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    local_rank: int,
    given: str | None,
    count: int,
    first: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    placement = dataclasses.replace(world.placement, size=8, local_rank=local_rank, local_size=4)
    chosen = choose_device(given, placement, count).value
    assert chosen == torch.device(first)
    own = neighbours(chosen, count)
    assert len(own) == count
    assert len({*own}) == (count if visible else 1)


@pytest.mark.parametrize(
    ("visible", "given", "count"), [(6, None, 2), (1, None, 2), (4, "cuda:3", 2), (4, None, 0)]
)
def test_devices_that_there_are_not_enough_of(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch, visible: int, given: str | None, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    placement = dataclasses.replace(world.placement, size=8, local_rank=3, local_size=4)
    with pytest.raises(LaunchError):
        choose_device(given, placement, count)
