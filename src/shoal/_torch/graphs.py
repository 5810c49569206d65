"""Private parts of torch's compiler: backends by name, and graphs of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shoal._torch.dispatch import tree_leaves, tree_map_only

Compile: TypeAlias = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""A backend of torch.compile."""


def named_backend(name: str) -> Compile:
    """Return a backend of torch.compile by its name; only torch.compile itself takes names."""
    from torch._dynamo import lookup_backend

    found: Compile = lookup_backend(name)
    return found


def modules_around(node: Node) -> list[int]:
    """Return the ids of the modules that run at a node of a graph, the innermost first."""
    keys = reversed(node.meta.get("nn_module_stack", {}))
    found = [str(each).partition("@")[0] for each in keys]  # "id@1" in the second call
    return [int(each) for each in found if each.isdecimal()]


def example_of(value: Any) -> Any:
    """Return the fake tensor, or the other value, that Dynamo computed for a node."""
    return value.meta.get("example_value") if isinstance(value, Node) else value


def copy_of_example(value: Any) -> Any:
    """Return a copy of `example_of(value)`, which an operation may change."""
    return tree_map_only(Tensor, torch.clone, example_of(value))


def returns_tensors(node: Node) -> bool:
    """Return whether a node of a graph calls a function that returns tensors."""
    if node.op not in ("call_function", "call_method"):
        return False
    return any(isinstance(each, Tensor) for each in tree_leaves(example_of(node)))


def graphs_in(node: Node, module: GraphModule) -> dict[str, GraphModule]:
    """Return the graphs that a node of `module` runs, by the names of their attributes."""
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    found = {name: getattr(module, name, None) for name in names}
    return {name: each for name, each in found.items() if isinstance(each, GraphModule)}


def is_checkpoint(node: Node) -> bool:
    """Return whether a node runs a graph, its first argument, that is recomputed in backward."""
    operations = torch.ops.higher_order
    return node.target is getattr(operations, "tag_activation_checkpoint", operations)


def as_number(size: Any) -> int:
    """Return the size of a dimension, or of the current input if the dimension is dynamic."""
    return int(size) if isinstance(size, int) else int(size.node.hint)


def add_input(module: GraphModule, name: str) -> Node:
    """Add an input to a graph, after all others."""
    places = module.graph.find_nodes(op="placeholder")
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first if not places else [*places][-1].next):
        added = module.graph.placeholder(name)
    added._dynamo_source = None
    return added


def fake_like(tensor: Tensor, inputs: list[Any]) -> Tensor:
    """Return a tensor of a constant shape for the compiler, which has `inputs` as the other ones."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(inputs)
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


@contextmanager
def tracing_mode(module: GraphModule) -> Iterator[None]:
    """Enter the mode in which a graph of Dynamo was traced, for tensors that functions create."""
    examples = [example_of(node) for node in module.graph.nodes]
    mode = next((each.fake_mode for each in examples if hasattr(each, "fake_mode")), None)
    shapes = getattr(mode, "shape_env", None)
    with mode or nullcontext(), shapes.ignore_fresh_unbacked_symbols() if shapes else nullcontext():
        yield


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, as those with which the compiler traces."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")


def copy_graph(module: GraphModule) -> GraphModule:
    """Return a copy of a graph of Dynamo, with what Dynamo knows of it, that shares its tensors."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    found = GraphModule(module, graph)
    found.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        found._param_name_to_source = module._param_name_to_source
    return found
