"""Random draws in compiled code, which are those of uncompiled code.

A backend of torch.compile receives a graph of torch's functions. Those that draw are replaced by
functions that compute the numbers from a further input of the graph: a table of the key and the first
position of each draw, which is filled before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal._torch.dispatch import TorchDispatchMode
from shoal._torch.graphs import (
    Compile,
    add_input,
    are_simulated,
    as_number,
    copy_graph,
    copy_of_example,
    fake_like,
    generate_loop,
    graphs_in,
    is_checkpoint,
    is_multiple,
    modules_around,
    named_backend,
    returns_tensors,
    tracing_mode,
)
from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.draws import (
    DrawRows,
    RegisteredModel,
    first_position,
    first_time,
    names_of,
    next_draw,
    running_module,
)
from shoal.strategies.random_draws.layouts import Fit, Layouts
from shoal.strategies.random_draws.operations import REPLACED, SiteOf
from shoal.strategies.random_draws.row_index import batch_rows
from shoal.util.errors import StepError


@dataclass
class TableRows(DrawRows):
    """The rows of a draw whose key and first position are a row of a table."""

    table: Tensor
    row: int
    rows: Any
    """The number of rows, which may be an expression of a graph."""

    def kept(self, limit: float, sizes: list[int]) -> Tensor:
        """Return for each element of rows of these sizes whether its number is below `limit`."""
        *outer, last = sizes or [1]
        found: Tensor = _below(self.table, self.row, [self.rows, *outer, -(-last // 4)], limit)
        return found.view(torch.bool)[..., :last]

    def numbers(self, sizes: list[int], dtype: torch.dtype, number: int) -> Tensor:
        """Return a number in [0, 1) for each element of rows of these sizes."""
        double = dtype == torch.float64
        found: Tensor = _uniform(self.table, self.row, [self.rows, *(sizes or [1])], double, number)
        return found


@torch.library.custom_op("shoal::below", mutates_args=())
def _below(table: Tensor, row: int, shape: Sequence[int], limit: float) -> Tensor:
    """Return four results of `philox.below` in the bytes of each int32, which one loop can compute."""
    key, rows, part = _entry(table, row, (*shape[:-1], 4 * shape[-1]))
    return philox.below(limit, key, rows, part, table.device).view(torch.int32)


@torch.library.custom_op("shoal::uniform", mutates_args=())
def _uniform(table: Tensor, row: int, shape: Sequence[int], double: bool, number: int) -> Tensor:
    key, rows, part = _entry(table, row, shape)
    dtype = torch.float64 if double else torch.float32
    return philox.uniform(key, rows, part, table.device, dtype, number).contiguous()


@_below.register_fake
def _(table: Tensor, row: int, shape: Sequence[int], limit: float) -> Tensor:
    return table.new_empty(shape, dtype=torch.int32)


@_uniform.register_fake
def _(table: Tensor, row: int, shape: Sequence[int], double: bool, number: int) -> Tensor:
    return table.new_empty(shape, dtype=torch.float64 if double else torch.float32)


def _entry(
    table: Tensor, row: int, shape: Sequence[int]
) -> tuple[philox.Key, philox.Rows, philox.Slice]:
    entry = table[row]
    first, second, position = entry.tolist() if entry.device.type == "cpu" else entry.unbind()
    return (first, second), philox.Rows(position, shape[0]), philox.complete(shape[1:])


@cache
def generate_loops() -> None:
    """Let inductor compute the numbers in its loops, once in a process."""
    operations = torch.ops.shoal
    generate_loop(operations.below.default, _packed_element, lambda limit: (torch.int32, 1))
    dtypes = (torch.float32, torch.float64)
    generate_loop(
        operations.uniform.default,
        _uniform_element,
        lambda double, number: (dtypes[double], philox.UNITS[double]),
    )


def _packed_element(entry: Any, index: Sequence[Any], limit: float) -> Any:
    *key, first = entry
    row, *outer, block = index
    low, high = philox.counter(row + first, block >> 2, outer)
    words = philox.words_of((key[0], key[1]), low, high)
    low, high = philox.counter(row + first, block, outer)
    others = philox.words_of(philox.next_key((key[0], key[1])), low, high)
    return philox.packed(words, others, block, limit)


def _uniform_element(entry: Any, index: Sequence[Any], double: bool, number: int) -> Any:
    *key, first = entry
    row, *outer, column = index
    low, high = philox.counter(row + first, column >> (1 if double else 2), outer)
    words = philox.words_of(philox.next_key((key[0], key[1]), number), low, high)
    return philox.chosen(philox.integers(words, double=double), column)


_NEED_VALUES = (
    "binomial",
    "multinomial",
    "multinomial.out",
    "poisson",
    "_sample_dirichlet",
    "_standard_gamma",
)
"""Operations whose numbers need loops or values that a graph does not have."""


class ReplacedDraws(TorchDispatchMode):
    """Computes random operations from the numbers of sites, as the dispatcher does in eager mode."""

    def __init__(self, site_of: SiteOf, unreached: list[str]) -> None:
        super().__init__()
        self._site_of, self._unreached = site_of, unreached

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        original = partial(operation, *arguments, **named)
        if (
            torch.Tag.nondeterministic_seeded not in operation.tags
            or named.get("generator") is not None
        ):
            return original()
        name = operation.name().removeprefix("aten::")
        if name in _CREATED:
            given = {key: value for key, value in named.items() if value is not None}
            with self:
                return _CREATED[name](*arguments, **given)
        if name == "randperm":
            found = original()
            site = self._site_of(found, None, of_step=True)
            if site is None:
                return found
            return site.uniform(found, torch.float64).argsort().to(found.dtype)
        if name not in REPLACED or name in _NEED_VALUES or _is_complex(arguments):
            self._unreached.append(name)
            return original()
        return REPLACED[name](self._site_of, original, *arguments, **named)


def _is_complex(arguments: tuple[Any, ...]) -> bool:
    """Return whether an operation would call another one for the real and imaginary parts."""
    return any(isinstance(each, Tensor) and each.is_complex() for each in arguments)


def _filled(create: Callable[..., Tensor], fill: str, bounds: int = 0) -> Callable[..., Tensor]:
    """Return an operation that creates a tensor and fills it; its first arguments are the bounds."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        tensor = create(*arguments[bounds:], **options)
        found: Tensor = getattr(tensor, fill)(*arguments[:bounds])
        return found

    return made


def _integers(create: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """Return an operation that draws integers below its last argument, without that in `place`."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        shape = arguments[place]
        bounds = [each for number, each in enumerate(arguments) if number != place % len(arguments)]
        if create is torch.empty:
            options.setdefault("dtype", torch.int64)
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return create(shape, **options).random_(low, high)

    return made


def _bernoulli(p: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(p).bernoulli_(p)


def _bernoulli_like(tensor: Tensor, p: float, **_: Any) -> Tensor:
    return torch.empty_like(tensor).bernoulli_(p)


_CREATED: dict[str, Callable[..., Tensor]] = {
    "rand": _filled(torch.empty, "uniform_"),
    "rand_like": _filled(torch.empty_like, "uniform_"),
    "randn": _filled(torch.empty, "normal_"),
    "randn_like": _filled(torch.empty_like, "normal_"),
    "randint": _integers(torch.empty, -1),
    "randint.low": _integers(torch.empty, -1),
    "randint_like": _integers(torch.empty_like, 0),
    "randint_like.low_dtype": _integers(torch.empty_like, 0),
    "bernoulli": _bernoulli,
    "bernoulli.p": _bernoulli_like,
}
"""Operations that create their result: in eager mode they call one of `REPLACED`."""


@cache
def keyed_backend(name: str = "inductor") -> Compile:
    """Return a backend of torch.compile whose draws in registered modules belong to samples.

    The same object for the same name: torch compiles a function again for another backend.
    """

    def keyed(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        running = running_module()
        if running is None or running[0].slices is not None:  # the slices of a graph are not known
            return named_backend(name)(graph, inputs)
        if name == "inductor":
            generate_loops()
        return _compile_graph(graph, inputs, named_backend(name), *running)

    return keyed


def _compile_graph(
    graph: GraphModule,
    inputs: list[Any],
    inner: Compile,
    model: RegisteredModel,
    root: str,
    trains: bool,
) -> Callable[..., Any]:
    """Compile a graph with the backend `inner`, with the draws replaced."""
    original, graph = graph, copy_graph(graph)  # Dynamo reads the original afterwards
    rewriter = _Rewriter(model, root, trains)
    table = add_input(graph, "shoal_draws")
    with tracing_mode(graph):
        rewriter.rewrite(graph, table)
    draws, device = rewriter.draws, rewriter.device
    if rewriter.unreached:
        rewriter.say_unreached()
    if rewriter.unreached or not draws:
        return inner(original, inputs)
    example = fake_like(torch.zeros(len(draws), 3, dtype=torch.int64, device=device), inputs)
    table.meta["example_value"] = example
    compiled = inner(graph, [*inputs, example])

    def run(*arguments: Any) -> Any:
        if are_simulated(arguments):
            return compiled(*arguments, example)
        found = first_time(partial(_rows, draws, device))
        if found is None:  # outside of a step
            found = torch.randint(1 << 32, (len(draws), 3), device=device)
        return compiled(*arguments, found)

    return run


@dataclass(frozen=True)
class _Draw:
    """A draw of a graph: the name of its module below the running one, and its layout."""

    path: str
    fit: Fit | None
    of_step: bool = False


def _rows(draws: list[_Draw], device: torch.device) -> tuple[Tensor] | None:
    """Count the draws of a graph, and return their keys and first positions. None outside of a step."""
    current, running = CURRENT_DRAWS.get(), running_module()
    if current is None or running is None:
        return None
    model, root, trains = running
    rows = []
    for draw in draws:
        site, key = next_draw(current, model, _joined(root, draw.path))
        if trains and not draw.of_step:
            _check_layout(model.layouts, site, draw.fit)
        rows.append([*key, first_position(current.micro, draw.fit)])
    return (torch.tensor(rows, dtype=torch.int64, device=device),)


def _joined(root: str, path: str) -> str:
    return ".".join(filter(None, (root, path)))


def _check_layout(layouts: Layouts, site: str, fit: Fit | None) -> None:
    """Raise StepError if the draws of a site have another layout than the compiled graph."""
    fits = layouts.possible.get(site)
    known = fits[0] if fits else None
    if fits is not None and known != fit:
        raise StepError(
            given=f"a compiled model that draws random numbers in {site.partition('#')[0]!r}",
            found=f"the dimension that counts samples is {known and known[0]}, "
            f"and the graph was compiled for {fit and fit[0]}",
            fix="shoal.samples(dim=…) around the draw, or leave compile out",
        )


class _Rewriter:
    """Replaces the nodes of a graph that draw, after it has run each on tensors without values."""

    def __init__(self, model: RegisteredModel, root: str, trains: bool) -> None:
        self.draws: list[_Draw] = []
        self.device = torch.device("cpu")
        self.unreached: list[str] = []
        """Draws that can't be replaced."""
        self._model, self._root, self._trains = model, root, trains
        self._names = names_of(model)
        self._current = CURRENT_DRAWS.get()

    def say_unreached(self) -> None:
        """Print the draws of the graph, since those that can be replaced draw by rank too."""
        if self._current is not None and self._current.micro.world is not None:
            names = [_joined(self._root, draw.path) for draw in self.draws]
            self._current.micro.world.print(
                "shoal: each rank draws its own random numbers in compiled code, in "
                + ", ".join(dict.fromkeys(self.unreached + list(filter(None, names))))
            )

    def rewrite(self, module: GraphModule, table: Node) -> None:
        """Replace the draws of a graph, whose keys are in its input `table`."""
        for node in list(module.graph.nodes):
            inner = graphs_in(node, module)
            if inner:
                self._rewrite_inside(node, inner, module, table)
            elif returns_tensors(node):
                start = len(self.draws)
                self._find_draws(node)
                if len(self.draws) > start:
                    _replace(node, table, start, self.draws[start:])
        module.recompile()

    def _rewrite_inside(
        self, node: Node, inner: dict[str, GraphModule], module: GraphModule, table: Node
    ) -> None:
        """Replace the draws of the graphs that a node runs."""
        start = len(self.draws)
        for name, shared in inner.items():
            graph = copy_graph(shared)
            self.rewrite(graph, add_input(graph, "shoal_draws"))
            if len(self.draws) == start:
                continue
            if not is_checkpoint(node):
                self.unreached.append(f"{node.name}, which runs a graph inside of the graph")
            setattr(module, name, graph)
            node.args = (*node.args, table)

    def _find_draws(self, node: Node) -> None:
        """Add the draws of a node to `draws`."""
        path, unreached = self._path(node), list[str]()

        def site_of(tensor: Tensor, generator: Any, *, of_step: bool = False) -> None:
            if generator is None:
                draw = self._draw(path, tensor, of_step)
                if draw.fit and not draw.fit[1]:
                    unreached.append("rows of which an index tells the sample")
                elif draw.fit and not is_multiple(tensor.shape[draw.fit[0]], draw.fit[1]):
                    unreached.append("a dimension of samples and another one whose size changes")
                self.draws.append(draw)
                self.device = tensor.device

        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), copy_of_example)
            try:
                with ReplacedDraws(site_of, unreached):
                    _callable(node)(*arguments, **named)
            except (RuntimeError, TypeError) as error:  # it may draw
                unreached.append(f"{node.name}, which fails without values: {error}")
        layer = _joined(self._root, path)
        self.unreached += [f"{layer} ({each})" if layer else each for each in unreached]

    def _path(self, node: Node) -> str:
        prefix = f"{self._root}." if self._root else ""
        for number in modules_around(node):
            name = self._names.get(number)
            if name is not None and name.startswith(prefix):
                return name.removeprefix(prefix)
        return ""

    def _draw(self, path: str, tensor: Tensor, of_step: bool) -> _Draw:
        shape = [as_number(each) for each in tensor.shape]
        if of_step or 0 in shape:  # no number is drawn for an empty tensor
            return _Draw(path, None, of_step)
        module, current = _joined(self._root, path), self._current
        if current is None:  # outside of a step
            return _Draw(path, (0, 1) if shape else None)
        model = current.models.setdefault(self._model, len(current.models))
        number = current.made.get((model, module), 0) + sum(draw.path == path for draw in self.draws)
        site = f"{current.scope}{module}#{number}"
        layouts = self._model.layouts if self._trains else Layouts()
        if site not in layouts.declared:  # compiled code does not run `shoal.samples`
            layouts.fit(site, shape, batch_rows(current))
        return _Draw(path, next(iter(layouts.possible[site]), None))


def _callable(node: Node) -> Callable[..., Any]:
    if callable(node.target):
        return node.target
    name = node.target
    return lambda tensor, *arguments, **named: getattr(tensor, name)(*arguments, **named)


def _replace(node: Node, table: Node, start: int, draws: list[_Draw]) -> None:
    """Replace a node that draws by one that computes the rows of a table from `start` on."""
    call = _callable(node)

    def keyed_draws(table: Tensor, *arguments: Any, **named: Any) -> Any:
        numbers = enumerate(draws, start)

        def site_of(tensor: Tensor, generator: Any, *, of_step: bool = False) -> TableRows | None:
            if generator is not None:
                return None
            row, draw = next(numbers)
            if not tensor.numel():
                return None
            place = table.to(tensor.device)
            if draw.fit is None:
                return TableRows(0, tensor.shape[0] if tensor.ndim else 1, place, row, 1)
            dim, each = draw.fit
            return TableRows(dim, each, place, row, tensor.shape[dim] // each)

        with ReplacedDraws(site_of, []), sdpa_kernel(SDPBackend.MATH):
            return call(*arguments, **named)

    with node.graph.inserting_before(node):
        made = node.graph.call_function(keyed_draws, (table, *node.args), node.kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
