"""Mixtures of experts on several ranks: step time, and the difference from one process.

    python benchmarks/experts.py [--ranks 2] [--width 256] [--layers 4] [--rounds 10] [--steps 3]

A Mixtral of transformers trains with AdamW in float32, on the same tokens in each way. The ways take
turns in the same processes:

- Shoal: `parallelize(…, shoal.ExpertParallel())` with the layout `expert=-1`.
- transformers: `DistributedConfig(fsdp_size=…, ep_size=…, ep_implementation="all_to_all")`.
- FSDP: torch's `fully_shard` around each layer; each rank computes with all experts.
- dense: the same for a model whose MLP has the FLOPs of the chosen experts.

Times are those of the slowest rank. The difference is that of the logits after as many steps in
float64 from those of one process, over the largest one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import shoal
from harness import alternate, finish, parse, ratios, show, spread, timed, versions
from helpers.ranks import Ranks

EXPERTS, CHOICES, SAMPLES, LENGTH, WORDS = 8, 2, 4, 128, 512


class Size(NamedTuple):
    """The size of the model, and the folder that holds its first parameters."""

    width: int
    layers: int
    folder: str


def config(size: Size, *, dense: bool = False) -> Any:
    """Return the configuration of a mixture, or of a dense model."""
    given: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width * (CHOICES if dense else 1),
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.width // 64,
        "num_key_value_heads": size.width // 64,
    }
    if dense:
        return transformers.MistralConfig(**given, sliding_window=None)
    return transformers.MixtralConfig(
        **given, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES, sliding_window=None
    )


def all_tokens(ranks: int) -> Tensor:
    """Return the tokens of a batch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(WORDS, (SAMPLES * ranks, LENGTH), generator=generator)


def tokens(world: shoal.World) -> Tensor:
    """Return the tokens of this rank."""
    return all_tokens(world.size).chunk(world.size)[world.rank]


def mixture(size: Size, **options: Any) -> Any:
    """Return the mixture in the default dtype."""
    dtype = torch.get_default_dtype()
    # torch's grouped product has no float64.
    how = "eager" if dtype == torch.float64 else "grouped_mm"
    return transformers.MixtralForCausalLM.from_pretrained(
        size.folder, dtype=dtype, experts_implementation=how, **options
    )


def sharded(world: shoal.World, model: Any) -> Any:
    """Shard a model with torch."""
    mesh = init_device_mesh("cpu", (world.size,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def with_shoal(world: shoal.World, size: Size) -> nn.Module:
    """Distribute the experts with Shoal."""
    result: nn.Module = shoal.parallelize(mixture(size), world, shoal.ExpertParallel())
    return result


def with_transformers(world: shoal.World, size: Size) -> nn.Module:
    """Distribute the experts with transformers."""
    distributed = DistributedConfig(
        fsdp_size=world.size,
        ep_size=world.layout.degree("expert"),
        ep_implementation="all_to_all",
    )
    result: nn.Module = mixture(size, distributed_config=distributed)
    return result


def with_fsdp(world: shoal.World, size: Size) -> nn.Module:
    """Shard all experts."""
    result: nn.Module = sharded(world, mixture(size))
    return result


def with_dense(world: shoal.World, size: Size) -> nn.Module:
    """Shard a dense model."""
    made = transformers.MistralForCausalLM(config(size, dense=True))
    result: nn.Module = sharded(world, made.to(torch.get_default_dtype()))
    return result


WAYS: dict[str, Callable[[shoal.World, Size], nn.Module]] = {
    "Shoal": with_shoal,
    "transformers": with_transformers,
    "FSDP": with_fsdp,
    "dense": with_dense,
}
KEPT: dict[str, Callable[[], object]] = {}
"""The steps of each way in a process of a rank."""


def training(world: shoal.World, way: str, size: Size) -> tuple[Any, Callable[[], object]]:
    """Return the model of a way, and a step of its training."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = WAYS[way](world, size)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words = tokens(world)
    if way == "Shoal":
        data = dict.fromkeys(("input_ids", "labels"), all_tokens(world.size))
        batches = shoal.Loader(data, world, batch_size=SAMPLES * world.size, shuffle=False).epochs(
            10**9
        )
        step = shoal.Step(model, optimizer, shoal.Task(mean_loss))
        return model, lambda: step(next(batches))

    def plain() -> None:
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()

    return model, plain


def mean_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the model's own loss over its tokens, and their number."""
    count = batch["labels"].numel()
    return output.loss * count, count


def measure(world: shoal.World, way: str, size: Size, steps: int) -> float:
    """Return the seconds of a step."""
    if way not in KEPT:
        KEPT[way] = training(world, way, size)[1]
        KEPT[way]()
    return timed(world, KEPT[way], steps)


def logits(world: shoal.World, way: str, size: Size, steps: int) -> Tensor:
    """Return the logits after some steps in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        model, step = training(world, way, size)
        for _ in range(steps):
            step()
        with torch.no_grad():
            found: Tensor = model(input_ids=tokens(world)).logits
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def expected(size: Size, ranks: int, steps: int) -> Tensor:
    """Return the logits of plain torch on one process."""
    torch.set_default_dtype(torch.float64)
    model = mixture(size)
    torch.set_default_dtype(torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words = all_tokens(ranks)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    found: Tensor = model(input_ids=words).logits.detach()
    return found


def main() -> None:
    """Compare the ways on some ranks."""
    given = parse(__doc__, ranks=2, width=256, layers=4, rounds=10, steps=3)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, Ranks(given.ranks, layout="expert=-1") as ranks:
        size = Size(given.width, given.layers, folder)
        torch.manual_seed(0)
        transformers.MixtralForCausalLM(config(size)).save_pretrained(folder)
        one = expected(size, given.ranks, given.steps)
        apart = {}
        for way in WAYS:
            if way != "dense":
                several = torch.cat(ranks.call(logits, way, size, given.steps))
                apart[way] = float((several - one).abs().max() / one.abs().max())
        actions = {way: partial(ranks.call, measure, way, size, given.steps) for way in WAYS}
        found = alternate(actions, given.rounds, uncounted=1)
    times = {way: [each[0] for each in rounds] for way, rounds in found.items()}
    rows = [
        {
            "way": way,
            "milliseconds": spread([1e3 * each for each in times[way]]),
            "Shoal / it": spread(ratios(times["Shoal"], times[way])),
            "from one process": f"{apart[way]:.1e}" if way in apart else None,
        }
        for way in WAYS
    ]
    show(versions("shoal", "torch", "transformers"), rows)
    finish(given, {"experts": [{k: str(v) for k, v in row.items()} for row in rows]})


if __name__ == "__main__":
    main()
