"""Steps of one rank of many on a simulated accelerator: `python -m helpers.simulated_device …`.

The device "sim" is torch's PrivateUse1 in Python, its tensors are fake (they have a device, a shape and
a dtype, and no values), and torch's fake process group, which serves no CPU tensors, stands for all
other ranks. torch raises where an operation mixes devices or a CPU tensor enters a collective. A
dispatch mode counts what would block the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

DEVICE = "sim"


class Stream:
    """A stream on which everything has already been done."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device(DEVICE, 0)

    def wait_stream(self, stream: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event that has already happened."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class DeviceModule(_DummyBackendModule):
    """What FSDP2 and Shoal ask `torch.cuda` for."""

    _streams: ClassVar[list[Stream]] = []

    def current_stream(self, device: object = None) -> Stream:
        return self._streams[-1]

    def default_stream(self, device: object = None) -> Stream:
        return self._streams[0]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        self._streams.append(stream or self._streams[-1])
        yield
        self._streams.pop()

    def set_device(self, device: object) -> None: ...
    def synchronize(self, device: object = None) -> None: ...
    def manual_seed(self, seed: int) -> None: ...
    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.empty(8, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None: ...


class Simulation(FakeTensorMode):
    """Fake tensors, whose operations that would block the host are counted by their place."""

    WAITING = ("aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten._unique")

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        name = str(function)
        if name.startswith("aten._local_scalar_dense"):
            if arguments[0].device.type == DEVICE:
                self.note("item")
            return 1.0 if arguments[0].is_floating_point() else 1
        if name.startswith("aten._pin_memory"):
            return arguments[0]
        if name.startswith("aten.is_pinned"):
            return True
        if name == "aten.equal.default":
            self.note("equal")
            return True
        if name.startswith("aten._to_copy"):
            source = arguments[0]
            self.copied(source, torch.device(keywords.get("device") or source.device), keywords)
        elif name.startswith("aten.copy_"):
            asynchronous = {"non_blocking": len(arguments) > 2 and arguments[2], **keywords}
            self.copied(arguments[1], arguments[0].device, asynchronous)
        elif name.startswith(self.WAITING):
            self.note(name)
        elif name.startswith("aten._foreach_"):
            self.on_one_device(name, arguments)
        return super().__torch_dispatch__(function, types, arguments, keywords)

    def copied(self, source: Tensor, target: torch.device, keywords: dict[str, Any]) -> None:
        if source.device.type != target.type and not keywords.get("non_blocking"):
            self.note(f"copy {source.device.type} to {target.type}")

    def on_one_device(self, name: str, arguments: Any) -> None:
        """Raise RuntimeError for lists on several devices, which fake tensors let pass."""
        given = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
        found = {each.device.type for each in given if each.dim() or each.device.type == DEVICE}
        if len(found) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(found)}")

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "src/shoal" in f.filename]
        place = f"{frames[-1].filename.split('src/')[-1]}:{frames[-1].name}" if frames else "torch"
        self.found[f"{what} in {place}"] += 1


DeviceModule.Stream = Stream  # type: ignore[attr-defined]
DeviceModule.Event = Event  # type: ignore[attr-defined]


class Block(nn.Module):
    """A residual block, whose parts tensor parallelism can divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


class Attention(nn.Module):
    """A residual block with attention over a sequence, which context parallelism can slice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(self.norm(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            query, key, value = heads.unbind()
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.outer(mixed.transpose(1, 2).flatten(2))
        return x + added


class Sequences(nn.Module):
    """Attention over sequences of 16 positions, and a head on their mean."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x.mean(1))
        return output


class MaskedExperts(nn.Module):
    """Experts that compute all tokens, and read no values on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 16
        self.weight = nn.Parameter(torch.empty(self.num_experts, width, width))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        outputs = [
            F.linear(hidden, self.weight[number]) * (weights * (index == number)).sum(1, keepdim=True)
            for number in range(self.num_experts)
        ]
        return torch.stack(outputs).sum(0)


class Mixture(nn.Module):
    """Two layers of experts, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, 16) for _ in range(2))
        self.experts = nn.ModuleList(MaskedExperts(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, index = router(x).softmax(-1).topk(2)
            x = x + experts(x, index, weights)
        output: Tensor = self.head(x)
        return output


NETS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "Net": (Net, (8,)),
    "Sequences": (Sequences, (8, 16)),
    "Mixture": (Mixture, (8,)),
}
"""Models by their width, and the shape of a micro-batch of their inputs but for the width."""


AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


def real(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a mesh that computes with values, which fake tensors do not have."""

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **keywords)

    return call


def setup() -> None:
    """Register the device and a process group that serves nothing else."""
    from shoal.strategies import optimizer_check

    _setup_privateuseone_for_python_backend(DEVICE, backend_module=DeviceModule())
    DeviceModule._streams.append(Stream())
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    dist.Backend.register_backend(
        "sim_fake", fake_pg._create_fake_pg, extended_api=True, devices=[DEVICE]
    )
    for name in ("to", "_apply"):  # all tensors are on the device already
        setattr(nn.Module, name, lambda self, *_, **__: self)
    for name in ("__init__", "__getitem__", "_flatten"):
        setattr(DeviceMesh, name, real(getattr(DeviceMesh, name)))
    AUTOCAST.fallback(torch.library.fallthrough_kernel)
    # Two results cannot be compared, so that no update would be found to be elementwise.
    vars(optimizer_check)["_tried"] = lambda optimizer: (None, "")
    for layer in (nn.Linear, nn.LayerNorm):  # fake tensors have no values to draw
        layer.reset_parameters = lambda self: None  # type: ignore[method-assign]


def make_world(size: int, layout: str, rank: int) -> Any:
    """Return the world of one rank of `size`, whose other ranks do not exist."""
    from shoal.distributed import env_vars, initialize, world
    from shoal.distributed.layout import Layout
    from shoal.distributed.seeds import DeterministicMode
    from shoal.distributed.watchdog.diagnosis import WaitLimits
    from shoal.distributed.watchdog.world_watchdog import Watchdog

    local = min(8, size)
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(size)},
        **{"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "simulated"},
        **{"GROUP_RANK": str(rank // local), "NODE_RANK": str(rank // local)},
    }
    dist.init_process_group(f"{DEVICE}:sim_fake", store=HashStore(), rank=rank, world_size=size)
    device = torch.device(DEVICE, 0)

    class Alone(Watchdog):
        """No other rank can be asked."""

        def __init__(self, group: object, **options: Any) -> None:
            super().__init__(None, **options)

    class SimulatedWorld(world.World):
        """A world in which every rank gives the same values as this one."""

        def gather(self, value: Any) -> list[Any]:
            return [value] * self.size

        def broadcast(self, value: Any, source: int = 0) -> Any:
            return value

    world.Watchdog = Alone  # type: ignore[attr-defined]
    joined = initialize.JoinedWorld(
        placement=env_vars.placement(),
        layout=Layout.parse(layout).resolve(size),
        device=device,
        devices=(device,),
        group=dist.group.WORLD,
        choices=(),
        told="",
    )
    limits = WaitLimits(step=600, prepare=3600)
    return SimulatedWorld(joined, 0, limits, deterministic_mode=DeterministicMode(enabled=False))


def without_neighbours(engine: Any) -> None:
    """Let a stage of a pipeline run though no other rank sends it the shapes that it receives."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import InferenceMode

    from shoal.strategies.pipeline import flow

    form = ((torch.Size((8, 64)), torch.float32),)
    objects = SimpleNamespace(send=lambda *_: None, receive=lambda *_: form)
    vars(flow)["objects"] = objects
    engine._own._proof = SimpleNamespace(check=lambda *_: None)

    def agree(schedule: object, stages: Any, *_: object) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    setattr(schedules._PipelineSchedule, "_warmup_p2p", agree)  # noqa: B010 - of another type


def peaks(
    model: nn.Module, optimizer: torch.optim.Optimizer, call: Callable[[], Any]
) -> dict[str, int]:
    """Return the largest numbers of bytes of each kind that torch's tracker sees during the call."""
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        call()
    found = tracker.get_tracker_snapshot("peak")[torch.device(DEVICE, 0)]
    return {str(getattr(kind, "value", kind)): size for kind, size in found.items() if size}


def repeated_groups() -> list[list[int]]:
    """Return the ranks of groups that have the same ranks as an earlier one."""
    ranks = [dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map]
    return [each for number, each in enumerate(ranks) if len(each) > 1 and each in ranks[:number]]


def main() -> None:
    """Take three steps and print what blocked in the last, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=int)
    parser.add_argument("layout")
    parser.add_argument("strategy", help="an expression, such as shoal.FSDP()")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--net", choices=NETS, default="Net")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--fused", action="store_true", help="results of steps are late")
    parser.add_argument("--evaluate", action="store_true", help="count an evaluation instead")
    parser.add_argument("--memory", action="store_true", help="print bytes by kind too")
    options = parser.parse_args()
    setup()
    world = make_world(options.size, options.layout, options.rank)
    import shoal
    from shoal.data.batch import Batch
    from shoal.data.micro import MicroBatch
    from shoal.strategies import engine_of
    from shoal.strategies.dtensor import is_divided

    if world.size > 1:
        assert world.mesh  # outside fake tensors, which its ranks are not
    simulation = Simulation()
    kind, rows = NETS[options.net]
    shape = (*rows, options.width)
    memory: dict[str, int] = {}
    with simulation:
        with torch.device(DEVICE, 0):
            net = kind(options.width)
        model = shoal.parallelize(net, world, eval(options.strategy, {"shoal": shoal}))
        # A fused optimizer takes sharded and other parameters in separate groups.
        kinds = [[p for p in model.parameters() if is_divided(p) is kind] for kind in (True, False)]
        groups = [{"params": parameters} for parameters in kinds if parameters]
        optimizer = torch.optim.AdamW(groups, fused=options.fused or None)
        task = shoal.Task(
            lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))
        )
        step = shoal.Step(model, optimizer, task, clip=1.0, precision=options.precision)
        step._prepared = True
        if "Pipeline" in options.strategy:
            without_neighbours(engine_of(model))
        count = options.micro_batches
        for number in range(3):
            simulation.found.clear()
            micros = []
            for index in range(count):
                value = (
                    torch.empty(shape, device=DEVICE),
                    torch.empty(8, dtype=torch.long, device=DEVICE),
                )
                micros.append(MicroBatch(value, 8 * index, 8, 1.0, world))
            batch = Batch(0, 8 * world.data_size * count, micros, seed=0, world=world)
            if options.memory and number == 2:
                memory = peaks(model, optimizer, functools.partial(step, batch))
            else:
                step(batch)
        if options.evaluate:
            samples = 8 * world.data_size * count
            data = (torch.empty(samples, *shape[1:]), torch.empty(samples, dtype=torch.long))
            simulation.found.clear()
            shoal.evaluate(
                step, data, metrics={"accuracy": shoal.Accuracy()}, batch_size=8 * world.data_size
            )
    devices = sorted({p.device.type for p in model.parameters() if not p.is_meta})
    found = {"blocking": simulation.found, "devices": devices, "memory": memory}
    print(json.dumps(found | {"repeated": repeated_groups()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
