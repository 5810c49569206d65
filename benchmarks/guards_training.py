"""A small training on some ranks in which bits are flipped, one in each run, with one guard or none.

All runs take the same steps from the same state, so that a difference is the effect of the flip.
All ranks draw the same flips from the seed, and the rank of a flip carries it out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from loops import loss
from shoal.strategies.dtensor import share
from shoal.telemetry.events import Events, Plain
from shoal.training.guards.create import Guard, create_guards
from shoal.training.optimizer_state import parameter_names

CLASSES, BATCH, MICRO_BATCHES, GROUP = 4, 24, 2, 2
FLIPPED, STEPS = 3, 4
"""The step of a flip, and the last one."""
CHECKS = {"continuity": (2, 2, 3), "replicas": (3, 4, 4), "gradients": (3, 3, 3)}
"""The first step of a run with each guard, the step of its first check, and the last step.

`continuity` takes checksums after step 2 and compares them in step 3.
"""
GUARDS = tuple(CHECKS)
MEMORY = ("parameter", "optimizer state", "constant buffer", "running statistics")
KINDS = (*MEMORY, "activation", "gradient before reduction", "gradient after reduction")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy, with the layout of its ranks."""

    name: str
    layout: str
    ranks: int
    exact: str = "rounding"
    options: Callable[[], Any] | None = None


CASES = {
    "single": Case(name="one process", layout="replicate=1", ranks=1),
    "ddp": Case(name="DDP, 3 ranks", layout="replicate=3", ranks=3),
    "bits": Case(name='DDP, exact="bits", 3 ranks', layout="replicate=3", ranks=3, exact="bits"),
    "fsdp": Case(name="FSDP, 2 ranks", layout="shard=2", ranks=2, options=shoal.FSDP),
    "hybrid": Case(name="FSDP, 2 x 2 ranks", layout="replicate=2,shard=2", ranks=4, options=shoal.FSDP),
    "tensor": Case(
        name="TensorParallel, 2 ranks",
        layout="tensor=2",
        ranks=2,
        options=partial(shoal.TensorParallel, plan={"*.wide": "column", "*.narrow": "row"}),
    ),
    "pipeline": Case(
        name="Pipeline, 2 ranks",
        layout="pipeline=2",
        ranks=2,
        options=partial(shoal.Pipeline, split_points=("back",)),
    ),
    "staged": Case(
        name="Pipeline, 2 x 2 ranks",
        layout="replicate=2,pipeline=2",
        ranks=4,
        options=partial(shoal.Pipeline, split_points=("back",)),
    ),
}


class Block(nn.Module):
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.norm = nn.ReLU(), nn.BatchNorm1d(width)
        self.register_buffer("table", torch.linspace(0.1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.narrow(self.act(self.wide(x + self.table))))
        return found


class Model(nn.Module):
    """Two blocks with a constant and with running statistics, so that each of two stages has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.front, self.back, self.head = Block(width), Block(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.back(self.front(x)))
        return found


class Place(NamedTuple):
    """A tensor of a rank that a bit can flip in.

    For activations and gradients, `call` is the number of the module call in the step, and `number`
    that of the module's parameter. For memory, `number` is that of the tensor.
    """

    name: str
    number: int
    call: int = -1


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A bit of a tensor of one rank that flips at a moment of step FLIPPED.

    `moment` is "start" (before the forward pass), "update" (before the optimizer), or the number of a
    module call, after which it happens. `element` and `bit` are fractions.
    """

    kind: str
    rank: int
    place: Place
    moment: str | int
    element: float
    bit: float
    applied: list[bool] = field(default_factory=list)

    def apply(self, tensor: Tensor) -> None:
        """Flip the bit in memory, unseen by PyTorch."""
        self.applied.append(True)
        memory = cast(Any, share(tensor.detach())).numpy()
        which = np.unravel_index(int(self.element * memory.size), memory.shape)
        raw = bytearray(memory[which].tobytes())
        bit = int(self.bit * 8 * len(raw))
        raw[bit // 8] ^= 1 << bit % 8
        memory[which] = np.frombuffer(raw, memory.dtype)[0]


def draw_flip(places: Sequence[Mapping[str, Sequence[Place]]], kind: str, draw: random.Random) -> Flip:
    """Draw a flip, given the places of all ranks."""
    rank = draw.choice([rank for rank, found in enumerate(places) if found[kind]])
    place = draw.choice(places[rank][kind])
    moment: str | int = place.call
    if kind == "gradient after reduction":
        moment = "update"
    elif kind in MEMORY:
        moment = draw.choice(("start", draw.randrange(len(places[rank]["activation"])), "update"))
    return Flip(
        kind=kind, rank=rank, place=place, moment=moment, element=draw.random(), bit=draw.random()
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run: the kinds of errors, what guards report, and the state of each rank."""

    errors: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    tensors: frozenset[str] = frozenset()
    digests: tuple[str, ...] = ()


class RankError(Exception):
    """Errors of some ranks, raised on all ranks."""

    def __init__(self, failed: Sequence[Outcome]) -> None:
        super().__init__()
        self.outcome = Outcome(
            errors=frozenset(name for each in failed for name in each.errors),
            ranks=frozenset(rank for each in failed for rank in each.ranks),
            tensors=frozenset(name for each in failed for name in each.tensors),
        )


class Recorder:
    """Keeps the events of guards, in place of the file of a Run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Plain]]] = []

    def write(self, kind: str, fields: Mapping[str, Plain]) -> None:
        """Keep an event."""
        self.events.append((kind, fields))

    def of(self, kind: str) -> list[Any]:
        """Return the events of a kind."""
        return [fields for each, fields in self.events if each == kind]


class GuardedTraining:
    """The training of a case on this rank, whose runs begin in the same state."""

    def __init__(self, world: shoal.World, case: Case, *, width: int = 8) -> None:
        self.world = world
        torch.manual_seed(0)
        strategy = case.options and case.options()
        self.model = shoal.parallelize(Model(width), world, strategy, statistics=GROUP)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer.register_step_pre_hook(lambda *_: self._reach("update"))
        # Listed once, since FSDP replaces parameters during the forward pass.
        names = parameter_names(self.model, self.optimizer)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._parameters: list[tuple[str, nn.Parameter]] = [
            (n, p) for n, p in zip(names, held, strict=True) if share(p.detach()).numel()
        ]
        self.step = shoal.Step(self.model, self.optimizer, shoal.Task(loss), clip=1.0)
        generator = torch.Generator().manual_seed(1)
        samples = BATCH * STEPS
        data = torch.randn(samples, width, generator=generator), torch.arange(samples) % CLASSES
        micro_batches = 1 if case.exact == "bits" else MICRO_BATCHES
        loader = shoal.Loader(data, world, batch_size=BATCH, micro_batches=micro_batches)
        self.batches = list(loader.epochs(1))
        engine: Any = self.step.engine
        engine.update = partial(self._update, engine.update)
        self._recorder = Recorder()
        self._flip: Flip | None = None
        self._calls = 0
        self._called: list[str] = []
        self._handle: Any = None
        for name, part in self.model.named_modules():
            if not any(True for _ in part.children()):
                part.register_forward_hook(partial(self._leave, name))
        self._begin: dict[int, list[Tensor]] = {}
        for number in range(1, FLIPPED):
            self.step(self.batches[number - 1])
            self._begin[number + 1] = [tensor.clone() for tensor in self._memory()]
        self.reference = self.run(None, None)
        self.places: list[dict[str, list[Place]]] = world.gather(self._find_places())

    def run(self, guard: str | None, flip: Flip | None) -> Outcome:
        """Take all steps with one guard or none, and a flip or none. Collective."""
        if flip is not None:
            flip.applied.clear()
        first, checked, last = CHECKS[guard] if guard else (FLIPPED, STEPS, STEPS)
        with torch.no_grad():
            for held, value in zip(self._memory(), self._begin[first], strict=True):
                held.copy_(value)
        self._recorder = Recorder()
        guards = self._create_guards(guard, checked - first) if guard else []
        outcome = Outcome()
        try:
            for number in range(first, last + 1):
                if number == FLIPPED and flip is not None and flip.rank == self.world.rank:
                    self._flip = flip
                # With this guard, a rank first runs the modules on the samples of another one.
                twice = guard == "gradients" and number == FLIPPED
                self._calls = -len(self.places[0]["activation"]) if twice else 0
                self._called.clear()
                self._reach("start")
                self.step(self.batches[number - 1])
                for each in guards:
                    each.tick()
        except RankError as error:
            outcome = error.outcome
        except shoal.ShoalError as error:  # on all ranks
            outcome = self._describe(error)
        for each in guards:
            each.close()
        if self._handle is not None:
            self._handle.remove()
        self._flip = self._handle = None
        if flip is not None and flip.rank == self.world.rank and not flip.applied:
            raise RuntimeError(f"the run has not come to {flip}")
        return replace(outcome, digests=() if guard else tuple(self.world.gather(self._digest())))

    def _create_guards(self, name: str, steps: int) -> list[Guard]:
        """Return a guard that first checks the step after `steps` more; by itself, the second step."""
        taken = self.step.number
        self.step.number += steps - 1
        chosen: dict[str, Any] = {each: each == name for each in GUARDS}
        only = shoal.Guards(**chosen)
        found = create_guards({"step": self.step}, only, cast(Events, self._recorder))
        self.step.number = taken
        return found

    def _update(self, update: Callable[..., None], *arguments: Any) -> None:
        """Update the parameters; raise an error of one rank on all ranks. Collective."""
        found = None
        try:
            update(*arguments)
        except Exception as error:  # a flipped bit may cause any
            found = self._describe(error)
        failures = torch.tensor(float(found is not None))
        self.world.all_reduce(failures)
        if failures:
            raise RankError(list(filter(None, self.world.gather(found))))

    def _describe(self, error: Exception) -> Outcome:
        events = self._recorder.of("corruption")
        return Outcome(
            errors=frozenset([type(error).__name__]),
            ranks=frozenset(rank for event in events for rank in event["ranks"]),
            tensors=frozenset(name for event in events for name in event["tensors"]),
        )

    def _leave(self, name: str, part: nn.Module, _: object, output: Tensor) -> None:
        """Follow a call of a module."""
        self._called.append(name)
        self._reach(self._calls, part, output)
        self._calls += 1

    def _reach(
        self, moment: str | int, part: nn.Module | None = None, output: Tensor | None = None
    ) -> None:
        """Flip the bit if this is its moment."""
        flip = self._flip
        if flip is None or flip.moment != moment:
            return
        self._flip = None
        if flip.kind == "activation" and output is not None:
            flip.apply(output)
        elif flip.kind == "gradient before reduction" and part is not None:
            parameter = [*part.parameters(recurse=False)][flip.place.number]
            self._handle = parameter.register_hook(partial(_flip_once, [flip]))
        elif flip.kind == "gradient after reduction":
            flip.apply(cast(Tensor, self._parameters[flip.place.number][1].grad))
        else:
            flip.apply(self._tensors(flip.kind)[flip.place.number][1])

    def _find_places(self) -> dict[str, list[Place]]:
        """Return where bits of this rank can flip, by kind, after a run."""
        parts = dict(self.model.named_modules())
        return {
            **{kind: _numbered(name for name, _ in self._tensors(kind)) for kind in MEMORY},
            "activation": [Place(name, 0, call) for call, name in enumerate(self._called)],
            "gradient before reduction": [
                Place(f"{name}.{key}", index, call)
                for call, name in enumerate(self._called)
                for index, (key, _) in enumerate(parts[name].named_parameters(recurse=False))
            ],
            "gradient after reduction": _numbered(name for name, _ in self._parameters),
        }

    def _tensors(self, kind: str) -> list[tuple[str, Tensor]]:
        """Return the tensors of a kind, with their names in the errors of guards."""
        if kind == "parameter":
            return [*self._parameters]
        if kind == "optimizer state":
            return [
                (f"optimizer state {key} of {name}", value)
                for name, parameter in self._parameters
                for key, value in self.optimizer.state[parameter].items()
            ]
        constant = kind == "constant buffer"
        return [
            (f"buffer {name}", buffer)
            for name, buffer in self.model.named_buffers()
            if name.endswith("table") == constant and not buffer.is_meta
        ]

    def _memory(self) -> list[Tensor]:
        found = [share(tensor.detach()) for kind in MEMORY for _, tensor in self._tensors(kind)]
        return [tensor for tensor in found if tensor.numel()]

    def _digest(self) -> str:
        raw = b"".join(cast(Any, tensor).numpy().tobytes() for tensor in self._memory())
        return hashlib.sha256(raw).hexdigest()


def _flip_once(left: list[Flip], gradient: Tensor) -> None:
    if left:
        left.pop().apply(gradient)


def _numbered(names: Iterable[str]) -> list[Place]:
    return [Place(name, index) for index, name in enumerate(names)]
