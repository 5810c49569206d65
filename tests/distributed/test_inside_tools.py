"""A Loader and a Run inside Accelerate, Fabric, Lightning and the Trainer: killed, with other ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.scripts import Script

pytestmark = [pytest.mark.processes, pytest.mark.peers, pytest.mark.timeout(900)]

BEGIN = """
import json, os, signal, sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shoal

torch.set_default_dtype(torch.float64)
folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(101, 6, generator=generator), torch.arange(101) % 3, torch.arange(101)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(batch, model, values, step):
    inputs, labels, numbers = values
    seen = [(batch.epoch, n) for n in numbers.tolist() if batch.micro.weight]
    with open(folder / f"seen-{os.getpid()}", "a") as file:
        file.write(json.dumps([step, seen]) + "\\n")
    return batch.averaged(F.cross_entropy(model(inputs), labels, reduction="sum"))


def end(model, rank):
    if rank == 0:
        print("trained", *(value for p in model.parameters() for value in p.flatten().tolist()))


def die(step):
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

"""

LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = prepare(model, optimizer)
world = shoal.init(seed=0)
loader = shoal.Loader(data(), world, batch_size=16)
with shoal.Run(folder / "run", model, loader, optimizer=optimizer) as run:
    run.restore()
    for batch in loader.epochs(2):
        for values in batch:
            tool.backward(loss_of(batch, model, values, run.step))
        optimizer.step()
        optimizer.zero_grad()
        run.tick(every=3)
        die(run.step)
task = shoal.Task(lambda out, b: (F.cross_entropy(out, b[1], reduction="sum"), len(b[1])))
scores = shoal.evaluate(model, data(), task=task, metrics={"right": shoal.Accuracy()}, world=world)
assert scores["samples"] == 101
end(model, world.rank)
"""

TOOLS = {
    "accelerate": BEGIN
    + """
from accelerate import Accelerator

model, tool = network(), Accelerator(cpu=True)
prepare = tool.prepare
"""
    + LOOP,
    "fabric": BEGIN
    + """
from lightning.fabric import Fabric

model = network()
tool = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
tool.launch()
prepare = tool.setup
"""
    + LOOP,
    "lightning": BEGIN
    + """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.position = None

    def train_dataloader(self):
        loader = shoal.Loader(data(), shoal.init(seed=0), batch_size=16)
        self.batches = shoal.LocalBatches(loader)
        if self.position is not None:
            self.batches.load_state_dict(self.position)
        return self.batches

    def on_save_checkpoint(self, checkpoint):
        checkpoint["position"] = self.batches.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.position = checkpoint["position"]

    def training_step(self, values, index):
        die(self.global_step)
        return loss_of(self.batches.batch, self.net, values, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


every = int(sys.argv[3])
saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=every, filename="{step}", save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=2,
    use_distributed_sampler=False,
    callbacks=[saves],
    logger=False,
    enable_progress_bar=False,
)
module = Module()
last = folder / f"step={every}.ckpt"
trainer.fit(module, ckpt_path=last if last.exists() else None)
end(module, trainer.global_rank)
""",
    "trainer": BEGIN
    + """
from transformers import Trainer, TrainerCallback, TrainingArguments


class Own(Trainer):
    def get_train_dataloader(self):
        return batches

    def compute_loss(self, model, values, return_outputs=False, num_items_in_batch=None):
        die(self.state.global_step)
        return loss_of(batches.batch, model, values, self.state.global_step)

    def _prepare_inputs(self, inputs):
        return inputs


class Keep(TrainerCallback):
    def on_save(self, args, state, control, **others):
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", f"loader-{args.process_index}")
        path.write_text(json.dumps(batches.state_dict()))


arguments = TrainingArguments(
    folder,
    use_cpu=True,
    ddp_backend="gloo" if int(os.environ["WORLD_SIZE"]) > 1 else None,
    num_train_epochs=2,
    max_grad_norm=0.0,
    save_steps=3,
    ignore_data_skip=True,
    report_to=[],
    disable_tqdm=True,
)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
arguments.device  # makes the process group
batches = shoal.LocalBatches(shoal.Loader(data(), shoal.init(seed=0), batch_size=16))
last = folder / "checkpoint-3"
if last.exists():
    batches.load_state_dict(json.loads((last / "loader-0").read_text()))
trainer = Own(model, arguments, optimizers=(optimizer, schedule), callbacks=[Keep()])
trainer.train(resume_from_checkpoint=str(last) if last.exists() else None)
end(model, arguments.process_index)
""",
}

PLAIN = (
    BEGIN
    + """
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with shoal.init(seed=0) as world:
    for batch in shoal.Loader(data(), world, batch_size=16).epochs(2):
        for inputs, labels, _ in batch:
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
end(model, 0)
"""
)


def trained(text: str) -> list[float]:
    (line,) = re.findall("^trained (.*)$", text, re.MULTILINE)
    return [*map(float, line.split())]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters after a loop of plain torch in one process."""
    place = tmp_path_factory.mktemp("plain")
    (place / "plain.py").write_text(PLAIN)
    command = [sys.executable, "plain.py", "out", "-1"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    return pytest.approx(trained(done.stdout), rel=0, abs=1e-12)  # type: ignore[return-value]


def seen(folder: Path, steps: range) -> Counter[tuple[int, int]]:
    """The samples of these steps, over all ranks; removes the notes."""
    found: Counter[tuple[int, int]] = Counter()
    for path in folder.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, samples = json.loads(line)
            found.update(map(tuple, samples) if step in steps else ())
        path.unlink()
    return found


@pytest.mark.parametrize(("tool", "saved"), [*((tool, 3) for tool in TOOLS), ("lightning", 7)])
def test_killed_it_goes_on_with_other_ranks(
    tool: str, saved: int, start: Callable[..., Script], tmp_path: Path, plain: list[float]
) -> None:
    """Two epochs of 101 samples: three ranks are killed after a save, two finish. Step 7 is the last
    of an epoch."""
    first = start(TOOLS[tool], "torchrun", "out", str(saved + 2), str(saved), size=3).end()
    assert first.code != 0
    samples = seen(tmp_path / "out", range(saved))
    second = start(TOOLS[tool], "torchrun", "out", "-1", str(saved), size=2).end()
    assert second.code == 0, second.err
    assert trained(second.out) == plain
    samples += seen(tmp_path / "out", range(saved, 14))
    assert samples == Counter((epoch, number) for epoch in range(2) for number in range(101))


@pytest.mark.parametrize("tool", TOOLS)
def test_one_process_trains_as_plain_torch(
    tool: str, start: Callable[..., Script], plain: list[float]
) -> None:
    done = start(TOOLS[tool], "torchrun", "out", "-1", "3", size=1).end()
    assert done.code == 0, done.err
    assert trained(done.out) == plain
