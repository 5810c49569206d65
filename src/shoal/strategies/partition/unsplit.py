"""The forward of the original model, run together by all ranks that have its stages.

No rank has the complete model. So each rank runs the user's outer forward on a shell of the model, and
when that calls a module, the rank that has the module computes it and broadcasts the result. Nothing is
traced: Python branches on real values.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch.dispatch import tree_flatten, tree_leaves, tree_unflatten
from shoal._torch.modules import (
    buffers,
    call_uncompiled,
    children,
    copied_attributes,
    parameters,
    set_tables,
)
from shoal._torch.waits import arrived
from shoal.data.micro import Drawing, Draws
from shoal.distributed import objects
from shoal.distributed.to_device import move, version
from shoal.strategies.deferred_init import like
from shoal.strategies.dtensor import whole
from shoal.strategies.partition.inputs import Inputs
from shoal.strategies.partition.stages import OuterGraph, Stage
from shoal.strategies.partition.trace import by_kind
from shoal.strategies.random_draws.draws import adopt
from shoal.util import accelerator
from shoal.util.errors import AgreementError


class CannotTravelError(Exception):
    """Error for an output of a module that cannot be sent to the other ranks."""


class StageRanks(NamedTuple):
    """The ranks of one replica, by their indices in a group."""

    group: dist.ProcessGroup
    place: int
    """Index of this rank."""
    owners: Sequence[int]
    """Indices of the ranks that run the stages."""
    device: torch.device

    def tell(self, source: int, tree: Any) -> Any:
        """Broadcast the tree of the rank at `source` to the device of each rank. Collective.

        Raises CannotTravelError on all ranks for a tree that cannot be sent; see
        `shoal.distributed.codec`.
        """
        tree = arrived(tree)
        try:
            received = objects.broadcast(tree if self.place == source else None, self.group, source)
        except AgreementError as error:
            raise CannotTravelError(error.found) from None
        return tree if self.place == source else move(received, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by index. Collective."""
        return objects.gather(value, self.group)


_META = torch.device("meta")


class DiffersError(Exception):
    """Error for a forward pass that calls other modules than the stages."""


class UnsplitModelError(Exception):
    """Error of the forward of the original model, in or outside its modules, on one rank or all."""


class UnsplitModel:
    """The original model, created before the split. It runs the outer `forward` as the user wrote it.

    `compute` calls a module of this rank's stages, given the number of the stage and the name.
    """

    def __init__(
        self,
        outer: OuterGraph,
        stages: Sequence[Stage],
        members: StageRanks,
        compute: Callable[[int, str, Any, Any], Any],
    ) -> None:
        self.members = members
        self._model = outer.model
        self._signature: inspect.Signature = outer.signature
        self._stages = stages
        self._compute = compute
        self._order: list[tuple[str, int]] = [
            (str(node.target), number)
            for number, stage in enumerate(stages)
            for node in stage.body.graph.nodes
            if node.op == "call_module"
        ]
        self._places: dict[str, list[int]] = defaultdict(list)
        for index, (name, _) in enumerate(self._order):
            self._places[name].append(index)
        self._shells: dict[str, nn.Module] = {}
        self._read = {str(node.target) for node in outer.graph.nodes if node.op == "get_attr"}
        self._shell = self._made(outer.model, "", {})
        self._needed = self._aliases(self._read | self._outside())
        self._made_calls: Counter[str] = Counter()
        self._draws: Draws
        self._running = 0
        self._states: list[Tensor] = []
        self.seen: list[tuple[int, list[Tensor]]] | None = None
        """Inputs of each module of this rank, by the index of the call; None: not recorded."""

    def __call__(self, inputs: Inputs, draws: Draws) -> Any:
        """Return the output of the forward. Collective, with the same errors on all ranks.

        Its random numbers are those of `draws`, which has made none yet.
        """
        self._made_calls.clear()
        self._draws = draws
        self._running = self.members.owners[0]
        self._states = _random_states(self.members.device)
        self._fill()
        try:
            _set_random_states(self.members.device, self.members.tell(self._running, self._states))
            positional, named = by_kind(self._signature, inputs)
            try:
                with Drawing(draws):
                    output = call_uncompiled(self._shell, *positional, **named)
            except (DiffersError, UnsplitModelError, CannotTravelError):
                raise  # as on the other ranks
            except Exception as error:  # maybe on this rank only, while the others call a module
                self._agree("", f"{type(error).__name__}: {error}")
                raise
            self._agree("")
        finally:
            self._empty()
        made = self._made_calls
        missing = [name for name, places in self._places.items() if made[name] < len(places)]
        if missing:
            raise DiffersError(f"in one process, its forward calls {missing[0]} less often")
        return output

    def name_of(self, index: int) -> str:
        """Return the module of a call, by the index of the call."""
        return self._order[index][0]

    def own_modules(self) -> list[tuple[nn.Module, list[int]]]:
        """Return the modules of this rank's stages, each with the indices of its calls."""
        found: dict[str, tuple[nn.Module, list[int]]] = {}
        for index, (name, stage) in enumerate(self._order):
            if self.members.owners[stage] == self.members.place:
                module = self._stages[stage].body.get_submodule(name)
                found.setdefault(name, (module, []))[1].append(index)
        return list(found.values())

    def _agree(self, call: str, error: str | None = None) -> None:
        """Wait until all ranks call this module or have ended. Raise on all ranks if they differ."""
        calls = self.members.gather((call, error))
        failed = next((text for _, text in calls if text is not None), None)
        if failed is not None:
            raise UnsplitModelError(failed)
        if any(other != call for other, _ in calls):
            raise DiffersError("its forward calls other modules on one rank than on another")

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a called module on its rank, with the random state of its stage, and broadcast it."""
        self._agree(name)
        number = self._made_calls[name]
        self._made_calls[name] += 1
        if number >= len(self._places[name]):
            raise DiffersError(f"in one process, its forward calls {name} more often")
        index = self._places[name][number]
        stage = self._order[index][1]
        owner, members = self.members.owners[stage], self.members
        if owner != self._running:
            if self._running == members.place:
                self._states = _random_states(members.device)
            if owner == members.place:
                _set_random_states(members.device, self._states)
            self._running = owner
        result: Any = None
        given = _Given((args, kwargs))
        failure: Exception | None = None
        if owner == members.place:
            if self.seen is not None:
                self.seen.append((index, tensors_in((args, kwargs))))
            try:
                found = self._compute(stage, name, args, kwargs)
                states, made = _random_states(members.device), self._draws.made
                result = found, given.changes(found), states, made, None
            except Exception as error:
                failure = error
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                result = None, ({}, {}), [], {}, text
        output, changes, states, made, text = members.tell(owner, result)
        if text is not None:
            raise UnsplitModelError(f"{name}: {text}") from failure
        _set_random_states(members.device, states)
        self._draws.made = made
        return output if owner == members.place else given.follow(output, *changes)

    def _made(self, module: nn.Module, name: str, memo: dict[int, nn.Module]) -> nn.Module:
        """Return a shell of a module: the same class and attributes, without memory."""
        if id(module) in memo:
            return memo[id(module)]
        scripted = isinstance(module, torch.jit.ScriptModule)
        shell = nn.Module() if scripted else nn.Module.__new__(type(module))
        memo[id(module)] = shell
        own = vars(shell)
        if not scripted:
            own.update(copied_attributes(module))
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and f"{name}.{key}".lstrip(".") not in self._read:
                    own[key] = _absent(value)
            set_tables(
                shell,
                {key: _absent(p) for key, p in parameters(module).items()},
                {key: _absent(b) for key, b in buffers(module).items()},
                {
                    key: None if part is None else self._made(part, f"{name}.{key}".lstrip("."), memo)
                    for key, part in children(module).items()
                },
            )
        forward = own.get("forward")
        if name in self._places:
            own["forward"] = partial(self._called, name)
        elif isinstance(forward, MethodType) and forward.__self__ is module:
            own["forward"] = MethodType(forward.__func__, shell)
        self._shells[name] = shell
        adopt(self._model, shell, name)
        return shell

    def _outside(self) -> set[str]:
        """Return the tensors of modules outside all modules that the stages call."""
        found: set[str] = set()
        for name, module in self._model.named_modules(remove_duplicate=False):
            parts = name.split(".")
            if not any(".".join(parts[:end]) in self._places for end in range(1, len(parts) + 1)):
                tensors = {**parameters(module), **buffers(module)}
                found |= {f"{name}.{key}".lstrip(".") for key, t in tensors.items() if t is not None}
        return found

    def _aliases(self, wanted: set[str]) -> list[list[str]]:
        """Return all names of each tensor, since the forward may use any name of a tied tensor."""
        model, known = self._model, defaultdict[int, list[str]](list)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            known[id(tensor)].append(name)
        # A tensor that is neither parameter nor buffer is on every rank, and has no name.
        return [names for names in known.values() if not wanted.isdisjoint(names)]

    def _fill(self) -> None:
        """Fill the shell with the tensors that the outer forward may use."""
        for names in self._needed:
            held = [(n, s) for s, stage in enumerate(self._stages) for n in names if n in stage.names]
            name, stage = held[0] if held else (names[0], None)
            owner = self.members.place if stage is None else self.members.owners[stage]
            tensor = None
            if owner == self.members.place:
                source = self._model if stage is None else self._stages[stage].body
                path, _, key = name.rpartition(".")
                tensor = whole(getattr(source.get_submodule(path), key).detach())
            if stage is not None:
                tensor = self.members.tell(owner, tensor)
            self._put(names, tensor)

    def _empty(self) -> None:
        for names in self._needed:
            self._put(names, None)

    def _put(self, names: Sequence[str], tensor: Tensor | None) -> None:
        """Store a tensor under its names; None frees its memory."""
        for name in names:
            path, _, key = name.rpartition(".")
            shell = self._shells.get(path)
            if shell is None:  # a further name of a module
                continue
            tables: tuple[dict[str, Any], ...] = (parameters(shell), buffers(shell))
            for held in tables:
                if held.get(key) is not None:
                    value = like(held[key], _META) if tensor is None else tensor
                    held[key] = nn.Parameter(value, False) if held is parameters(shell) else value


class _Given:
    """The tensor arguments of a module, which it may change in place and return."""

    def __init__(self, arguments: Any) -> None:
        self._tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._versions = [version(tensor) for tensor in self._tensors]

    def changes(self, output: Any) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Return the arguments that the module has changed, and the outputs that are arguments."""
        changed = {
            index: tensor
            for index, (tensor, before) in enumerate(zip(self._tensors, self._versions, strict=True))
            if version(tensor) != before
        }
        leaves = enumerate(tree_leaves(output))
        places = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        same = {at: places[id(leaf)] for at, leaf in leaves if id(leaf) in places}
        return changed, same

    def follow(self, output: Any, changed: dict[int, Tensor], same: dict[int, int]) -> Any:
        """Repeat the changes that the module made on another rank, and return its output."""
        for index, value in changed.items():
            if self._tensors[index].shape != value.shape:  # as unsqueeze_ changes it
                self._tensors[index].resize_(value.shape)
            self._tensors[index].copy_(value)
        if not same:
            return output
        leaves, form = tree_flatten(output)
        return tree_unflatten(
            [self._tensors[same[at]] if at in same else leaf for at, leaf in enumerate(leaves)], form
        )


def tensors_in(tree: Any) -> list[Tensor]:
    """Return copies of the tensors in a tree."""
    return [leaf.detach().clone() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _absent(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or nn.parameter.is_lazy(tensor) else like(tensor, _META)


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *accelerator.random_state(device)]


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0].cpu())
    accelerator.set_random_state(device, states[1:])
