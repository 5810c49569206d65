"""One small training with any combination of features, through Shoal and in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.compiling import compiler_with
from helpers.reference import LEARNING_RATE, SEED, Trained
from shoal.strategies.dtensor import whole

WORDS, WIDTH, LENGTH, SAMPLES, BATCH = 12, 8, 6, 21, 8
STEPS, SAVED, CLIP, DECAY = 4, 2, 0.05, 0.5
"""Three steps are an epoch, of which the last is short."""

Names = Collection[str]
"""Features by name, ways of spreading among them."""

COMPILED = compiler_with("aot_eager")
"""All of torch.compile but the compiler, which takes half a minute."""

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

APPROXIMATE: dict[str, Any] = {  # what does not give the numbers of one process
    "int8": shoal.DDP(compression="int8", bucket_cap_mb=0.001),
    "PowerSGD": shoal.DDP(compression=shoal.PowerSGD(rank=2)),
    "LocalSGD": shoal.LocalSGD(sync_every=2),
    "DiLoCo": shoal.DiLoCo(sync_every=2),
    "Hogwild": shoal.Hogwild(max_staleness=1),
}


class Experts(nn.Module):
    """Experts that compute all tokens, so that compiled code has no sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden[:, :WIDTH])
        for expert in range(len(self.weight)):
            chosen = (weights * (index == expert)).sum(1, keepdim=True)
            result = result + F.linear(hidden, self.weight[expert]) * chosen.to(hidden.dtype)
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(2 * WIDTH, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        mixed: Tensor = self.experts(tokens, index, weights)
        return mixed.view(x.shape[0], x.shape[1], WIDTH)


class Block(nn.Module):
    def __init__(self, names: Names) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = Mixture() if "experts" in names else nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query = self.query(y).unflatten(2, (-1, 2)).transpose(1, 2)
        key = self.key(y).unflatten(2, (-1, 2)).transpose(1, 2)
        value = self.value(y).unflatten(2, (-1, 2)).transpose(1, 2)
        z = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        added: Tensor = self.narrow(torch.tanh(self.wide(self.norm2(x))))
        return x + added


class Net(nn.Module):
    """Tokens in, logits out; a critic takes the probabilities of tokens."""

    def __init__(self, names: Names, *, critic: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WORDS, WIDTH) if critic else nn.Embedding(WORDS, WIDTH)
        self.blocks: Any = nn.ModuleList([Block(names), Block(names)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if "tied" in names and not critic:
            self.head.weight = self.first.weight
        if "unused" in names:
            self.spare = nn.Linear(3, 3)
        self.scale: Any = nn.Parameter(torch.tensor(0.9)) if "scalars" in names else 1
        if "strides" in names:
            linears: list[Any] = [self.head, self.blocks[0].wide]
            for linear in linears:
                linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        if "frozen" in names:
            self.first.requires_grad_(False)
            self.blocks[0].wide.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.head(self.norm(y)) * self.scale
        return logits

    def again(self, logits: Tensor) -> Tensor:
        """What a loss calls: modules of the model, outside its forward."""
        y: Tensor = self.blocks[0](logits @ self.head.weight)
        wide: Tensor = self.blocks[1].wide(y)
        return wide


def build(names: Names, *, critic: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7 + critic)
        model = Net(names, critic=critic)
    return model if HALVES.keys() & names else model.double()


def dataset() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch[1]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


def direct(model: Any, output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A loss with modules and weights of the model, which it does not get from its forward."""
    total, count = loss(output, batch)
    penalty = sum(p.square().sum() for p in model.parameters())
    return total + model.again(output).square().sum() + count * penalty, count


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        scores, torch.full_like(scores, float(real)), reduction="sum"
    )


def shown(names: Names, batch: Any) -> Tensor:
    """What the critic sees of real data."""
    return F.one_hot(batch[1], WORDS).to(torch.float32 if HALVES.keys() & names else torch.float64)


def cheated(critic: Any, output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return judged(critic(output.softmax(-1)), True), batch[1].numel()


def caught(critic: Any, generator: Any, output: Tensor, batch: Any) -> tuple[Tensor, int]:
    with torch.no_grad():
        invented = generator(batch[0])
    total = judged(output, True) + judged(critic(invented.softmax(-1)), False)
    return total, batch[1].numel()


def models(names: Names) -> dict[str, Any]:
    """The functions that make the models, in the order in which they are trained."""
    if "two models" not in names:
        return {"net": partial(build, names)}
    return {"critic": partial(build, names, critic=True), "generator": partial(build, names)}


def tasks(names: Names, called: dict[str, Any]) -> dict[str, shoal.Task]:
    if "net" in called:
        return {"net": shoal.Task(partial(direct, called["net"]) if "direct" in names else loss)}
    critic, generator = called["critic"], called["generator"]
    return {
        "critic": shoal.Task(partial(caught, critic, generator), inputs=partial(shown, names)),
        "generator": shoal.Task(partial(cheated, critic)),
    }


def autocast(names: Names, device: str = "cpu") -> AbstractContextManager[Any]:
    kinds = [kind for name, kind in HALVES.items() if name in names]
    return torch.autocast(device, kinds[0]) if kinds else nullcontext()


def optimizers(names: Names, model: nn.Module) -> list[torch.optim.Optimizer]:
    if "Adafactor" in names:
        # Its default divides the rounding errors in gradients of key biases by themselves.
        return [torch.optim.Adafactor(model.parameters(), lr=LEARNING_RATE, eps=(1e-8, 1e-3))]
    if "Muon, AdamW" not in names:
        return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE),
        torch.optim.AdamW(others, lr=LEARNING_RATE),
    ]


def begun(names: Names) -> dict[str, Any]:
    """Parameters before the first step."""
    called = {name: make() for name, make in models(names).items()}
    return {f"{n}.{k}": p.detach().numpy() for n, m in called.items() for k, p in m.named_parameters()}


def expected(names: Names) -> Trained:
    """The same in plain torch: one process, whole batches, means."""
    called = {name: make() for name, make in models(names).items()}
    jobs = tasks(names, called)
    stepping = {name: optimizers(names, model) for name, model in called.items()}
    averages = [p.detach().clone() for m in called.values() for p in m.parameters()]
    tokens, labels = dataset()
    norms, losses = [], []
    orders = (
        torch.from_numpy(shoal.Permutation(SAMPLES, seed=SEED, epoch=e).indices(0, SAMPLES))
        for e in (0, 1)
    )
    indices = [part for order in orders for part in order.split(BATCH)][:STEPS]
    for part in indices:
        batch = (tokens[part], labels[part])
        for name, model in called.items():
            for other in called.values():
                other.zero_grad()
            inputs = shown(names, batch) if name == "critic" else batch[0]
            with autocast(names):
                total, count = jobs[name].loss(model(inputs), batch)
            (total / count).backward()
            limit = CLIP if "clip" in names else float("inf")
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            losses.append(float(total.detach() / count))
            for each in stepping[name]:
                each.step()
        now = [p.detach() for m in called.values() for p in m.parameters()]
        averages = [DECAY * old + (1 - DECAY) * new for old, new in zip(averages, now, strict=True)]
    parameters = {f"{n}.{k}": p.detach() for n, m in called.items() for k, p in m.named_parameters()}
    if "EMA" in names:
        parameters |= {f"{n} averaged": a for n, a in zip([*parameters], averages, strict=True)}
    if "evaluate" in names:
        with torch.no_grad(), autocast(names):
            total, count = jobs[[*called][-1]].loss(called[[*called][-1]](tokens), (tokens, labels))
        losses.append(float(total / count))
    return Trained({n: p.numpy().copy() for n, p in parameters.items()}, norms, losses)


class Training:
    """The same through Shoal, on as many ranks as there are."""

    def __init__(self, world: shoal.World, names: Names) -> None:
        self.world, self.names = world, names
        self.models: dict[str, nn.Module] = {}
        for name, make in models(names).items():
            model = make if "factory" in names else make()
            self.models[name] = shoal.parallelize(model, world, strategies(names, name, world))
        self.steps = {name: self._step(name) for name in self.models}
        self.averages = {name: shoal.EMA(m, decay=DECAY) for name, m in self.models.items()}
        pieces = 4 if {"Pipeline", "zero bubble"} & {*names} else 1
        self.data = shoal.Loader(
            dataset(),
            world,
            batch_size=BATCH,
            micro_batches=2 * pieces if "micro-batches" in names else pieces,
            seed=SEED,
        )
        self.norms: list[float] = []
        self.losses: list[float] = []

    def _step(self, name: str) -> shoal.Step:
        model, task = self.models[name], tasks(self.names, self.models)[name]
        optimizer = optimizers(self.names, model)
        if "custom loop" in self.names:  # which says itself what the options of a Step would say
            return shoal.Step(model, optimizer, task)
        return shoal.Step(
            model,
            optimizer,
            task,
            precision=next((half for half in HALVES if half in self.names), "fp32"),
            clip=CLIP if "clip" in self.names else None,
            compile=next((how for how in ("inductor", "blocks", "script") if how in self.names), None),
        )

    def run(self, begin: int, end: int, directory: Path | None) -> Trained:
        """The steps from `begin` to `end`, with a run in `directory` if there is one."""
        if directory is None:
            for batch in itertools.islice(self.data.epochs(9), end):
                self._all(batch)
            return self._trained()
        state = {f"average of {name}": average for name, average in self.averages.items()}
        with shoal.Run(directory, self.steps, self.data, state=state, trackers=()) as run:
            run.restore()
            for batch in itertools.islice(self.data.epochs(9), end - begin):
                self._all(batch)
                run.tick()
            run.save()
        return self._trained()

    def _all(self, batch: shoal.Batch) -> None:
        for name, step in self.steps.items():
            if "custom loop" in self.names:
                norm, mean = self._by_hand(step, batch)
            else:
                result = step(batch)
                while result.skipped:  # fp16 lowers its scale first
                    result = step(batch)
                norm, mean = result.norm, result.loss
            self.norms.append(norm)
            self.losses.append(mean)
            self.averages[name].update()

    def _by_hand(self, step: shoal.Step, batch: shoal.Batch) -> tuple[float, float]:
        call: Any = step.model
        if "inductor" in self.names:
            call = torch.compile(step.model)
        if "blocks" in self.names and not self.norms:
            for name in ("blocks.0", "blocks.1"):
                step.model.get_submodule(name).compile()
        if "script" in self.names:
            call = torch.jit.script(step.model)
        for micro in batch:
            with autocast(self.names, self.world.device.type):
                inputs = shown(self.names, micro) if call is self.models.get("critic") else micro[0]
                total, count = step.task.loss(call(inputs), micro)
            batch.backward(total=total, count=count, model=step.model)
        finished = batch.finish(step.model, clip=CLIP if "clip" in self.names else None)
        step.optimizer.step()
        step.optimizer.zero_grad()
        return finished.norm, finished.loss

    def _trained(self) -> Trained:
        if APPROXIMATE.keys() & {*self.names}:
            for step in self.steps.values():  # where ranks meet that went their own ways
                shoal.evaluate(step, dataset())
        found = self._parameters("")
        if "EMA" in self.names:
            for average in self.averages.values():
                average._swap()
            found |= self._parameters(" averaged")
        if "evaluate" in self.names:
            with autocast(self.names if "custom loop" in self.names else (), self.world.device.type):
                result = shoal.evaluate([*self.steps.values()][-1], dataset())
            self.losses.append(float(result["loss"]))
        return Trained(found, self.norms, self.losses)

    def _parameters(self, ending: str) -> dict[str, Any]:
        return {
            f"{name}.{key}{ending}": whole(p.detach()).cpu().numpy().copy()
            for name, model in self.models.items()
            for key, p in model.named_parameters()
        }


def train(world: shoal.World, names: Names, directory: Path | None = None) -> Trained:
    """On ranks; up to the save, with a directory."""
    torch.compiler.reset()
    torch.jit._state._clear_class_state()  # which remembers the dtype of autocast
    torch.compile = COMPILED
    if directory is not None:
        return Training(world, names).run(0, SAVED, directory)
    return Training(world, names).run(0, STEPS, None)


def strategies(names: Names, model: str, world: shoal.World) -> Any:
    """What `parallelize` is given."""
    some: list[Any] = []
    if "ActivationCheckpointing" in names:
        some.append(shoal.ActivationCheckpointing())
    if "ActivationCheckpointing, save" in names:
        some.append(shoal.ActivationCheckpointing(save=("products", "attention")))
    plain = {
        "DevicePlacement": shoal.DevicePlacement((0, 0)),
        "ContextParallel": shoal.ContextParallel(),
    }
    some += [each for name, each in plain.items() if name in names]
    if {"TensorParallel", "sequence", "logits"} & {*names}:
        some.append(shoal.TensorParallel(plan=plan(names, model)))
    if "ExpertParallel" in names:
        some.append(shoal.ExpertParallel())
    if "Pipeline" in names:
        some.append(shoal.Pipeline(split_points=("blocks.1",)))
    elif "RPCPipeline" in names:
        some.append(
            shoal.RPCPipeline(
                stages={"front": ("first", "blocks.0"), "back": ("blocks.1", "norm", "head")}
            )
        )
    elif "zero bubble" in names:
        some.append(shoal.Pipeline(split_points=("blocks.0", "blocks.1", "norm"), schedule="zbv"))
    elif {"FSDP", "HSDP"} & {*names}:
        some.append(shoal.FSDP())
    approximate = [APPROXIMATE[name] for name in names if name in APPROXIMATE]
    if approximate and "unused" in names and isinstance(approximate[0], shoal.DDP):
        some.append(replace(approximate[0], find_unused_parameters=True))
    elif approximate:
        some += approximate
    elif "DDP" in names or [type(each) for each in some[-1:]] == [shoal.DevicePlacement]:
        some.append(
            shoal.DDP(
                bucket_cap_mb=0.001,
                find_unused_parameters="unused" in names,
            )
        )
    return some or None


def plan(names: Names, model: str) -> dict[str, str]:
    columns = ("query", "key", "value", "wide")
    found = {f"blocks.*.{name}": "column" for name in columns}
    found |= {f"blocks.*.{name}": "row" for name in ("out", "narrow")}
    if "experts" in names:
        found = {name: way for name, way in found.items() if not name.endswith(("wide", "narrow"))}
    if "sequence" in names:
        found["first"] = "sequence" if model == "critic" else "vocabulary"
        found |= {f"blocks.*.norm{number}": "sequence" for number in (1, 2)} | {"norm": "sequence"}
    if "tied" in names and model != "critic":
        found |= {"first": "vocabulary", "head": "head"}
    if "logits" in names:
        found |= {"head": "logits"}
    return found
