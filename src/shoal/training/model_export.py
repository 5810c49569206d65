"""Export and import of models as files that other tools read."""

from __future__ import annotations

import copy
import io
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal._torch.modules import bare
from shoal.checkpoint import Agreement
from shoal.checkpoint.collective_errors import explained
from shoal.checkpoint.inspect.extract import PICKLED, save_pickled
from shoal.distributed.rank_zero_first import RankZeroFirst
from shoal.distributed.to_device import move, tensors_in
from shoal.distributed.world import World
from shoal.strategies import engine_of, known_engine
from shoal.strategies.dtensor import divided, whole
from shoal.strategies.eval_mode import evaluation
from shoal.strategies.multi_device import span_of
from shoal.strategies.other_tools import reading_engine
from shoal.training.run import Run
from shoal.training.step import Step
from shoal.training.weights.exporting import bytes_in, export_directory
from shoal.util.errors import CheckpointError, LaunchError
from shoal.util.regular_file import appearing

_EXTENSION = re.compile(r"\.[A-Za-z]+\d?")
"""The end of the name of a file; names of models such as llama-3.2 have none."""


def export(
    source: Run | Step | nn.Module,
    path: str | Path,
    *,
    example: tuple[Any, ...] | None = None,
    max_shard_size: int | str = "5GB",
    world: World | None = None,
) -> Path:
    """Write the model to a file or a directory for use without Shoal, with the names of your module.

    Call it on all ranks. If each rank has the complete model (as under DDP), rank 0 may export to a
    file alone; directories, and models that are sharded or split (FSDP, TensorParallel, Pipeline,
    RPCPipeline), are collective. The write is atomic: an earlier file or directory is replaced when the
    new one is complete.

    Args:
        source: Parallelized model, a Step, or a Run. Of a Run, the first model is written.
        path: File or directory to write. Without an extension, it is a directory in the format of
            Hugging Face: `model.safetensors`, or `model.safetensors.index.json` and files, which the
            ranks write in parallel. The directory of a transformers model also has the configuration,
            and its tensors are those of `save_pretrained`. Of a file, the extension sets the
            format: `.safetensors` and `.pt` or `.pth` (by torch.save) hold the state_dict, `.ts` is
            TorchScript and `.pt2` a torch.export program, both in eval mode. Entries of the state_dict
            that are not tensors are kept in `.pt` if `torch.load(…, weights_only=True)` can read them;
            rank 0 prints the names of the others.
        example: Positional arguments of the model, for tracing. Required for `.pt2`; without it,
            TorchScript compiles the code. A `.pt2` program takes any batch size, the first dimension of
            each tensor, unless the model's code fixes it. Default: None.
        max_shard_size: Bytes of the tensors in one file of a directory, or a string such as "500MB". A
            larger tensor has a file for itself. Default: "5GB".
        world: World of a model that another tool trains, such as Accelerate or DDP. `None` for a
            parallelized model, which has its own. Default: None.

    Returns:
        The path, on all ranks once the file has been written.

    Raises:
        CheckpointError: On all ranks, for another extension, a file that can't be written, a program of
            a sharded or split model, or a directory with files that no export has written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory, shoal.init() as world:
        ...     model = shoal.parallelize(torch.nn.Linear(4, 1), world)
        ...     path = shoal.export(model, f"{directory}/model.safetensors")
        ...     shoal.load(model, path)
        >>> path.name
        'model.safetensors'
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            given=f"shoal.export({type(source).__name__}, {type(path).__name__})",
            found="the first argument is the model, the second the path of the file",
            fix="shoal.export(model, 'model.safetensors')",
        )
    path = Path(path)
    model = _model(source, world)
    engine = engine_of(model)
    world = engine.world
    engine.settle()
    if not _EXTENSION.fullmatch(path.suffix):
        export_directory(model, path, world, bytes_in(max_shard_size))
        return path
    if path.suffix not in (*_STATES, *_PROGRAMS):
        raise CheckpointError(
            given=f"shoal.export(…, {str(path)!r})",
            found=f"the extensions are {', '.join((*_STATES, *_PROGRAMS))}",
            fix="shoal.export(model, 'model.safetensors')",
        )
    if path.suffix in _PROGRAMS:
        _refuse_divided(model, path)
    replicated = _replicated(model)
    state: dict[str, Any] = {}
    if path.suffix in _STATES and not (replicated and not world.is_rank_zero):
        state = _whole_state(model, keep=world.is_rank_zero, alone=replicated)

    def save() -> None:
        if not world.is_rank_zero:
            return
        with appearing(path) as partial, evaluation(model), torch.no_grad():
            if path.suffix in _STATES:
                _STATES[path.suffix](_held(state, path, world), partial)
            else:
                _PROGRAMS[path.suffix](model, example, partial)

    given = f"shoal.export(…, {str(path)!r})"
    if replicated:
        _first_alone(world, given, path, save)
    else:
        Agreement(world).together(given, save)
    return path


def _replicated(model: nn.Module) -> bool:
    """Return whether rank 0 has the complete model, the same as the other ranks at the same step."""
    engine = engine_of(model)
    whole = engine.world.layout.degree("pipeline") == 1 and not divided(dict(model.named_parameters()))
    return whole and not engine.independent_steps and engine.world.membership.survivors is None


def _first_alone(world: World, given: str, path: Path, save: Callable[[], None]) -> None:
    """Save on rank 0, which waits for no other rank; the others wait until the file has been written.

    Many scripts call export on rank 0 only. The step is part of the key: rank 0 may have written the
    same path before without the other ranks.
    """
    if world.size == 1:
        Agreement(world).together(given, save)
        return
    key = f"export {world.watchdog.steps} {path}"
    try:
        with world.service(RankZeroFirst).named(key, within=world.watchdog.limits.prepare) as first:
            if first:
                with explained(given, world.rank):
                    save()
    except LaunchError as error:
        raise CheckpointError(
            given=given,
            found=error.found,
            fix="see rank 0's own error; call shoal.export on all ranks, or on rank 0 only",
        ) from None


def _held(state: dict[str, Any], path: Path, world: World) -> dict[str, Any]:
    """Return the entries of a state that the format of `path` can hold; print the other names."""
    kept = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) or (path.suffix in PICKLED and _readable(value))
    }
    left = [name for name in state if name not in kept]
    if left:
        why = (
            "not a tensor"
            if path.suffix not in PICKLED
            else "not readable by torch.load with weights_only=True"
        )
        world.print(
            f"shoal: {path} does not hold {', '.join(left)} of the state_dict, {why}; shoal.load "
            "keeps the model's own values for these"
        )
    return kept


def _readable(value: object) -> bool:
    """Return whether `torch.load(…, weights_only=True)` can read `value` from a file."""
    if type(value) in (dict, OrderedDict):
        return all(map(_readable, (*value, *value.values())))  # type: ignore[misc, attr-defined]
    if type(value) in (list, tuple, torch.Size):
        return all(map(_readable, value))  # type: ignore[call-overload]
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, Tensor) or type(value) in plain


def _model(source: Run | Step | nn.Module, world: World | None) -> nn.Module:
    if world is not None and isinstance(source, nn.Module):
        return reading_engine(source, world).module
    if isinstance(source, Run):
        return next(iter(source.train_states.values())).model
    return source.model if isinstance(source, Step) else bare(source)


def _script(model: nn.Module, example: tuple[Any, ...] | None, path: Path) -> None:
    model, example = _alone(model, example)
    made = torch.jit.script(model) if example is None else torch.jit.trace(model, example)
    _write(made, torch.jit.save, path)


def _program(model: nn.Module, example: tuple[Any, ...] | None, path: Path) -> None:
    if example is None:
        raise CheckpointError(
            given=f"shoal.export(…, {path.suffix!r}) without an example",
            found="torch.export traces the model",
            fix="shoal.export(model, 'model.pt2', example=(inputs,))",
        )
    from torch.export import Dim, ShapesCollection  # takes half a second

    world = engine_of(model).world
    alone, inputs = _alone(model, example)
    sizes = ShapesCollection()
    for tensor in tensors_in(inputs):
        if tensor.dim() and len(tensor) > 1:  # torch.export fixes sizes of 0 and 1 anyway
            sizes[tensor] = {0: Dim.AUTO}  # any size, unless the code requires this one
    program = torch.export.export(alone, inputs, dynamic_shapes=sizes.dynamic_shapes(alone, inputs))
    fixed = _fixed_sizes(program)
    if fixed:
        world.print(
            f"shoal: the .pt2 program takes only these sizes of the first dimension: {fixed}; the "
            "model's code fixes them, or the example has a single sample (pass two or more)"
        )
    _write(program, torch.export.save, path)


def _fixed_sizes(program: torch.export.ExportedProgram) -> str:
    """Return the inputs of a program whose first dimension has only one size, as text."""
    inputs = set(program.graph_signature.user_inputs)
    found = []
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node.name in inputs else None
        if isinstance(value, Tensor) and value.dim() and str(value.shape[0]).isdecimal():
            found.append(f"{node.name}: {value.shape[0]}")
    return ", ".join(found)


def _alone(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Return a copy of the model that needs no other rank and moves nothing between devices."""
    span, model = span_of(model), copy.deepcopy(model)
    if span is None or not span.hooked:
        return model, example
    from shoal.strategies.device_placement.transfer_hooks import without_arrivals

    return without_arrivals(model), move(example, torch.device("cpu"))


def _write(made: Any, save: Callable[[Any, IO[bytes]], object], path: Path) -> None:
    # Write to memory first: torch's own writer aborts the process if the disk is full.
    memory = io.BytesIO()
    save(made, memory)
    path.write_bytes(memory.getbuffer())


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    except KeyError as error:  # safetensors raises it for an unknown dtype
        odd = [name for name, tensor in tensors.items() if tensor.dtype in error.args]
        if not odd:
            raise
        raise CheckpointError(
            given=f"shoal.export(…, {path.suffix!r})",
            found=f"{odd[0]} is {str(tensors[odd[0]].dtype).removeprefix('torch.')}, for which the "
            "safetensors format has no type",
            fix="shoal.export(model, 'model.pt')",
        ) from None


_STATES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    ".safetensors": _save_file,
    **dict.fromkeys(PICKLED, save_pickled),
}
_PROGRAMS: dict[str, Callable[[nn.Module, tuple[Any, ...] | None, Path], None]] = {
    ".ts": _script,
    ".pt2": _program,
}


def _refuse_divided(model: nn.Module, path: Path) -> None:
    engine = known_engine(model)
    in_stages = engine is not None and engine.world.layout.degree("pipeline") > 1
    if in_stages or divided(dict(model.named_parameters())):
        raise CheckpointError(
            given=f"shoal.export(…, {path.suffix!r}) of a {type(model).__name__}",
            found="its parameters are sharded or split over ranks, and this format holds a complete "
            "program",
            fix="call shoal.export(model, 'model.safetensors'); then, in one process, build model = "
            "Model(), call shoal.load(model, 'model.safetensors'), and export the model as "
            f"{path.suffix}",
        )


def _whole_state(model: nn.Module, *, keep: bool, alone: bool) -> dict[str, Any]:
    """Return the model's state, one tensor at a time on the CPU; empty on ranks that do not `keep` it.

    Collective, unless this rank has the complete model (`alone`).
    """
    # Copies, so that tied weights keep both names: safetensors raises for shared memory.
    world = engine_of(model).world
    own = model.state_dict()
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    plain = move({n: v for n, v in own.items() if n not in tensors}, torch.device("cpu"))
    mine = ({name: (value.shape, value.dtype) for name, value in tensors.items()}, plain)
    holders = [mine] if alone else world.gather(mine)
    state: dict[str, Any] = {}
    for name, (shape, dtype) in {n: form for held, _ in holders for n, form in held.items()}.items():
        source = next(rank for rank, (held, _) in enumerate(holders) if name in held)
        tensor = whole(tensors[name].detach()).contiguous() if name in tensors else None
        if source > 0 and world.rank in (0, source):  # a pipeline stage of another rank than 0
            tensor = _sent(tensor, torch.Size(shape), dtype, source, world)
        if keep and tensor is not None:
            state[name] = tensor.cpu().clone()
    others = {name: value for _, held in reversed(holders) for name, value in held.items()}
    return state | others if keep else {}


def _sent(
    tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype, source: int, world: World
) -> Tensor:
    """Return the tensor of rank `source`, on that rank and on rank 0."""
    if tensor is not None:
        dist.send(tensor, 0, group=world.group)
        return tensor
    received = torch.empty(shape, dtype=dtype, device=world.device)
    dist.recv(received, source, group=world.group)
    return received
