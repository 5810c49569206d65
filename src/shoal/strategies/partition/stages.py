"""Splitting of a model into consecutive stages: its outer forward as a graph, split before modules.

torch.fx traces only modules that contain a split point, without running them. Other modules are not
split and remain the user's modules. Values for a later stage pass through the stages in between, except
values computed from the model's inputs alone: every stage has these inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal._torch.dispatch import tree_map
from shoal._torch.modules import buffers, children, parameters
from shoal.strategies.partition.elsewhere import Elsewhere
from shoal.strategies.partition.trace import IN_PLACE, expect_tensor, graph_of
from shoal.strategies.random_draws.draws import adopt
from shoal.util import accelerator
from shoal.util.clock import CLOCK
from shoal.util.errors import StepError

_DRAWING = (
    *("attention", "bernoulli", "cauchy", "dropout", "exponential", "geometric", "gumbel"),
    *("multinomial", "normal", "poisson", "rand", "rrelu", "uniform"),
)
"""Parts of the names of random functions: two stages must not draw the same numbers twice."""


@dataclass(frozen=True)
class Stage:
    """One stage: its graph, its tensors and modules, and the values from the stage before."""

    body: fx.GraphModule
    """Its arguments are the received values, then the inputs of the model that it needs."""
    received: tuple[str, ...]
    needed: tuple[str, ...]
    names: frozenset[str]
    """The user's names of its parameters and buffers."""
    modules: frozenset[str]
    """The modules that it calls."""

    def learning_twice(self) -> list[str]:
        """Return the modules with trainable parameters that the stage calls more than once."""
        calls = Counter(str(n.target) for n in self.body.graph.nodes if n.op == "call_module")
        return [
            name
            for name, times in calls.items()
            if times > 1 and any(p.requires_grad for p in self.body.get_submodule(name).parameters())
        ]


@dataclass(frozen=True)
class OuterGraph:
    """The forward of a model as a graph in which each module that is not split is one node."""

    model: nn.Module
    graph: fx.Graph
    signature: inspect.Signature
    """Signature of the required inputs of the model."""
    asked: str = "shoal.Pipeline(…)"
    """The strategy as the user wrote it, for errors."""

    @property
    def given(self) -> str:
        """The strategy and the model, for errors."""
        return f"{self.asked} around {type(self.model).__name__}"

    def calls(self) -> list[str]:
        """Return the names of the called modules, in order."""
        return [str(node.target) for node in self.graph.nodes if node.op == "call_module"]

    def cut(self, before: Sequence[str], given: str) -> list[Stage]:
        """Return the stages that begin at the modules `before`. Raise StepError for wrong ones."""
        nodes = list(self.graph.nodes)
        numbers = [self._number(nodes, name, given) for name in before]
        if sorted(set(numbers)) != numbers or 0 in numbers:
            raise StepError(
                given=given,
                found="split points must be in the order in which the model calls its modules: "
                + ", ".join(self.calls()),
                fix="list each split point once, in this order, without the first module",
            )
        stage_of = {
            node: sum(number <= index for number in numbers) for index, node in enumerate(nodes)
        }
        local = _local(nodes)
        self._refuse_changes(local)
        return [_Part(self, stage_of, local, number).stage() for number in range(len(before) + 1)]

    def changes(self, node: fx.Node) -> fx.Node | None:
        """Return the node that this one changes in place, or None."""
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op == "call_module":
            there = getattr(self.model.get_submodule(str(node.target)), "inplace", False) is True
        else:
            there = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            there = there or node.kwargs.get("inplace") is True
        changed = node.kwargs.get("out") or (node.args[0] if there and node.args else None)
        return changed if isinstance(changed, fx.Node) else None

    def _refuse_changes(self, local: set[fx.Node]) -> None:
        """Raise StepError for changes of inputs or attributes in place, which stages do not share."""
        for node in self.graph.nodes:
            changed = self.changes(node)
            if changed in local or (changed is not None and changed.op == "get_attr"):
                raise StepError(
                    given=self.given,
                    found=f"its forward changes {changed} in place ({node.target})",
                    fix="write x = x * 2 instead of x *= 2 or x.mul_(2); move counters of calls into "
                    "a separate module",
                )

    def _number(self, nodes: Sequence[fx.Node], name: str, given: str) -> int:
        for number, node in enumerate(nodes):
            if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
                first_module = not any(earlier.op == "call_module" for earlier in nodes[:number])
                return 0 if first_module else number
        raise StepError(
            given=given,
            found=f"{type(self.model).__name__} does not call a module {name!r}; it calls "
            + ", ".join(self.calls()),
            fix="pass names of modules as in named_modules(): each split point is the first module of "
            "a stage",
        )


def trace(model: nn.Module, opened: Iterable[str], asked: str = OuterGraph.asked) -> OuterGraph:
    """Return the forward of `model` and of the modules `opened` as a graph, without running it.

    `asked` is the strategy as the user wrote it, for errors. Raises StepError for code that cannot be
    traced: branches on tensors, and code that differs between training and evaluation.
    """
    given = f"{asked} around {type(model).__name__}"
    parameters = list(inspect.signature(model.forward).parameters.values())
    several = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if several:
        raise StepError(
            given=given,
            found=f"its forward takes any number of inputs, {several[0]}",
            fix="write def forward(self, x): …, with a name for each input, in a class that inherits "
            f"from {type(model).__name__}",
        )
    signature = inspect.Signature([p for p in parameters if p.default is p.empty])
    return OuterGraph(model, graph_of(model, set(opened), signature, given), signature, asked)


def _local(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes computed from the model's inputs alone, without modules and parameters."""
    local: set[fx.Node] = set()
    for node in nodes:
        computed = node.op in ("call_function", "call_method") and not _draws(node)
        computed = computed and node.target is not expect_tensor  # each stage would repeat it
        if node.op == "placeholder" or (
            computed and node.all_input_nodes and local.issuperset(node.all_input_nodes)
        ):
            local.add(node)
    return local


def draws_itself(stage: Stage) -> bool:
    """Return whether a stage may draw random numbers outside its modules."""
    nodes = stage.body.graph.nodes
    return any(node.op in ("call_function", "call_method") and _draws(node) for node in nodes)


def _draws(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in _DRAWING)


class _Part:
    """Builder of one stage."""

    def __init__(
        self, outer: OuterGraph, stage_of: Mapping[fx.Node, int], local: set[fx.Node], number: int
    ) -> None:
        self._outer = outer
        self._stage_of = stage_of
        self._local = local
        self._number = number
        self._last = number == max(stage_of.values())
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._needed: list[str] = []

    def stage(self) -> Stage:
        received = self._crossing(self._number)
        for node in received:
            self._copies[node] = self._graph.placeholder(node.name)
        mine = [node for node, stage in self._stage_of.items() if stage == self._number]
        changed = {self._outer.changes(node) for node in mine}
        sent = [] if self._last else self._crossing(self._number + 1)
        used = {i for node in mine for i in node.all_input_nodes} & self._local
        self._place_inputs([*used, *(node for node in mine if node in self._local)])
        for node in received:
            if node in changed:  # autograd does not allow it for received leaves
                self._copies[node] = self._graph.call_method("clone", (self._copies[node],))
        for node in mine:
            if node.op == "output":
                self._graph.output(fx.node.map_arg(node.args[0], self._copy))
            elif node not in self._local:
                self._copy(node)
        if not self._last:
            self._graph.output(tuple(self._copy(node) for node in sent))
        body = fx.GraphModule(self._outer.model, self._graph)
        adopt(self._outer.model, body)
        return Stage(
            body,
            tuple(node.name for node in received),
            tuple(self._needed),
            frozenset(name for name, _ in _tensors(body)),
            frozenset(str(node.target) for node in mine if node.op == "call_module"),
        )

    def _crossing(self, boundary: int) -> list[fx.Node]:
        """Return the nodes computed before stage `boundary` and used there or later."""
        return [
            node
            for node, stage in self._stage_of.items()
            if stage < boundary
            and node not in self._local
            and any(self._stage_of[user] >= boundary for user in node.users)
        ]

    def _place_inputs(self, wanted: Sequence[fx.Node]) -> None:
        """Add the model's inputs that this stage needs, in the order of the model's signature."""
        found: set[fx.Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node.op == "placeholder":
                found.add(node)
            else:
                pending.extend(node.all_input_nodes)
        for node in self._outer.graph.nodes:
            if node in found:
                self._copies[node] = self._graph.placeholder(str(node.target))
                self._needed.append(str(node.target))

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            self._copies[node] = self._graph.node_copy(node, self._copy)
        return self._copies[node]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = list(module.named_parameters(remove_duplicate=False))
    return [*found, *module.named_buffers(remove_duplicate=False)]


def tied(stages: Sequence[Stage], owners: Sequence[int]) -> tuple[str, str] | None:
    """Return two names of one parameter in stages of different owners, or None."""
    seen: dict[int, tuple[int, str]] = {}
    for stage, owner in zip(stages, owners, strict=True):
        for name, parameter in stage.body.named_parameters(remove_duplicate=False):
            other, first = seen.setdefault(id(parameter), (owner, name))
            if other != owner:
                return first, name
    return None


def refuse_tied(stages: Sequence[Stage], owners: Sequence[int], given: str, fix: str) -> None:
    """Raise StepError if stages on different ranks have the same parameter."""
    both = tied(stages, owners)
    if both is not None:
        one, other = both
        found = f"{one} and {other} are one parameter" if one != other else f"{one} is used"
        raise StepError(given=given, found=f"{found} in two stages on different ranks", fix=fix)


def keep_only(model: nn.Module, mine: Sequence[Stage], others: Sequence[Stage]) -> None:
    """Remove modules and tensors from `model` that only `others` need. Other names stay the same.

    An Elsewhere takes the place of each module, and raises StepError when it is used.
    """
    kept = frozenset[str]().union(*(stage.names for stage in mine))
    called = frozenset[str]().union(*(stage.modules for stage in mine))
    for stage in others:
        for name in stage.modules - called:
            owner, _, attribute = name.rpartition(".")
            siblings = children(model.get_submodule(owner))
            if attribute in siblings:
                siblings[attribute] = Elsewhere(type(model).__name__, name)
        for name in stage.names - kept:
            owner, _, attribute = name.rpartition(".")
            try:
                part = model.get_submodule(owner)
            except AttributeError:  # removed with its module
                continue
            parameters(part).pop(attribute, None)
            buffers(part).pop(attribute, None)


def opened_by(names: Iterable[str]) -> set[str]:
    """Return the modules that contain those of `names`, without the model itself."""
    return {
        ".".join(parts[:end])
        for parts in (name.split(".") for name in names)
        for end in range(1, len(parts))
    }


def chains(model: nn.Module) -> set[str]:
    """Return the Sequentials and lists of the model outside blocks, which may be split anywhere."""
    found: set[str] = set()
    pending = [("", model)]
    while pending:
        prefix, part = pending.pop()
        for name, child in part.named_children():
            if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
                path = f"{prefix}.{name}" if prefix else name
                found.add(path)
                pending.append((path, child))
    return found


def seconds(outer: OuterGraph, arguments: Sequence[Any], device: torch.device) -> list[float]:
    """Return the forward time of each node on `arguments`, in seconds: the least of three runs."""
    timed = [0.0] * len(outer.graph.nodes)
    module = fx.GraphModule(copy.deepcopy(outer.model).eval().to(device), outer.graph)
    arguments = [tree_map(lambda leaf: _on(device, leaf), argument) for argument in arguments]
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    class Timed(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            begun = CLOCK.now()
            result = super().run_node(n)
            accelerator.synchronize(device)
            found[numbers[n]] = CLOCK.now() - begun
            return result

    runs: list[list[float]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for _ in range(4):
            found = list(timed)
            Timed(module).run(*arguments)
            runs.append(found)
    return [min(times) for times in zip(*runs[1:], strict=True)]


def _on(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def balanced(costs: Sequence[tuple[str | None, float]], stages: int) -> list[str]:
    """Return the split points that minimize the cost of the most expensive stage.

    `costs` has a name and a cost for each node, in order. A node with a name may begin a stage. Raises
    ValueError if there are fewer of them than `stages`.
    """
    starts = [0, *(number for number, (name, _) in enumerate(costs) if name is not None)][1:]
    if len(starts) < stages:
        raise ValueError(f"{len(starts)} parts for {stages} stages")
    sums = [0.0]
    for _, cost in costs:
        sums.append(sums[-1] + cost)
    bounds = [0, *starts[1:], len(costs)]  # nodes before the first part belong to it
    # best[k][i]: the least possible maximum of k stages over the nodes before bounds[i].
    best = [[float("inf")] * len(bounds) for _ in range(stages + 1)]
    came = [[0] * len(bounds) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for count in range(1, stages + 1):
        for end in range(count, len(bounds)):
            options = [
                (max(best[count - 1][begin], sums[bounds[end]] - sums[bounds[begin]]), begin)
                for begin in range(count - 1, end)
            ]
            best[count][end], came[count][end] = min(options)
    points: list[str] = []
    end = len(bounds) - 1
    for count in range(stages, 1, -1):
        end = came[count][end]
        points.append(str(costs[bounds[end]][0]))
    return points[::-1]
