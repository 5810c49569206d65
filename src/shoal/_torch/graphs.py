"""Private parts of torch's compiler, and of the random operations in its graphs.

Backends by name, graphs of Dynamo, loops of inductor for further operations, and the interception of
random operations ahead of the kernels that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
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


def is_multiple(size: Any, number: int) -> bool:
    """Return whether a size is a multiple of a number for all inputs that a graph is compiled for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size % number == 0))


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


def are_simulated(inputs: Sequence[Any]) -> bool:
    """Return whether tensors have no values, as where torch splits a graph for DDP."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(inputs) is not None


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


Element = Callable[..., "LoopValue"]
"""Called with the words of a row of the table, the indices of an element, and the options."""


class LoopValue:
    """An int64 number in a loop that inductor generates, with the operators of a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, operation: str, other: LoopValue | int) -> LoopValue:
        from torch._inductor.virtualized import ops

        value = other.value if isinstance(other, LoopValue) else ops.constant(other, torch.int64)
        return LoopValue(getattr(ops, operation)(self.value, value))

    __add__ = partialmethod(_with, "add")
    __sub__ = partialmethod(_with, "sub")
    __mul__ = partialmethod(_with, "mul")
    __and__ = partialmethod(_with, "bitwise_and")
    __or__ = partialmethod(_with, "bitwise_or")
    __xor__ = partialmethod(_with, "bitwise_xor")
    __rshift__ = partialmethod(_with, "bitwise_right_shift")


def generate_loop(
    operation: Any, element: Element, result: Callable[..., tuple[torch.dtype, float]]
) -> bool:
    """Let inductor generate a loop for an operation, which it fuses with others, in place of a call.

    The arguments of the operation are a table of dtype int64, the number of a row of it, the shape of
    its result, and options. `result(*options)` returns the dtype of the result and the unit of its
    integers. Return False if this torch lacks a name for it, and the operation is called.
    """
    try:
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False

    def lower(table: Any, row: int, shape: Any, *options: Any) -> Any:
        load = table.make_loader()
        dtype, unit = result(*options)

        def loop(index: Any) -> Any:
            entry = [LoopValue(load([row, place])) for place in range(3)]
            places = [LoopValue(ops.index_expr(each, torch.int64)) for each in index]
            value = ops.to_dtype(element(entry, places, *options).value, dtype)
            return value if unit == 1 else ops.mul(value, ops.constant(unit, dtype))

        return Pointwise.create(device=table.get_device(), dtype=dtype, inner_fn=loop, ranges=[*shape])

    register_lowering(operation, type_promotion_kind=None)(lower)
    return True


Instead = Callable[..., Any]
"""Called with `original`, a function without arguments that draws as torch does, and the arguments."""

_KEY = "BackendSelect"


def replace_draws(instead: Mapping[str, Instead]) -> bool:
    """Call `instead[name]` in place of the kernels of aten operations, for the rest of the process.

    Autograd runs before it. Tracing with fake tensors, as torch.compile does, bypasses it.
    Return False if this torch lacks a name for it, and nothing is intercepted.
    """
    keyset = getattr(torch._C, "_dispatch_keyset_full_after", None)
    if keyset is None:
        return False
    below = keyset(getattr(torch._C.DispatchKey, _KEY))
    # Graphs that run as they are, with backend="eager", would otherwise have torch compile the kernel.
    uncompiled: Any = torch.compiler.disable(_call)
    for name, call in instead.items():
        packet, _, overload = name.partition(".")
        kernel = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _LIBRARY.impl(name, partial(uncompiled, call, kernel, below), _KEY, with_keyset=True)
    return True


def replace_attention(instead: Instead, key: str = "AutogradCUDA") -> None:
    """Call `instead` in place of `scaled_dot_product_attention` on a device, for the whole process.

    `original` chooses one of torch's kernels, as torch does. Autograd runs in them, not before.
    """
    kernel = torch.ops.aten.scaled_dot_product_attention.default

    def call(*arguments: Any, **named: Any) -> Any:
        return instead(partial(kernel.decompose, *arguments, **named), *arguments, **named)

    _LIBRARY.impl("scaled_dot_product_attention", call, key)


_LIBRARY: Any = torch.library.Library("aten", "IMPL")


def _call(call: Instead, kernel: Any, below: Any, keys: Any, *arguments: Any, **named: Any) -> Any:
    return call(partial(kernel.redispatch, keys & below, *arguments, **named), *arguments, **named)


def in_backward() -> bool:
    """Return whether this thread runs backward, in which parts of a forward pass may be recomputed."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1
