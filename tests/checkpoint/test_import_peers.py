"""Half-finished trainings of the tools themselves: three steps, saved, imported, three more in both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import shoal
from helpers.half_trained import assert_continued, built

pytestmark = [pytest.mark.processes, pytest.mark.peers, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
BEGIN = """
import os, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from helpers.half_trained import BATCH, built, cloned, decaying, named_states, samples

def expect(at_save, end):
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save((at_save, end), "expected.pt")
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = built()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
size = accelerator.num_processes
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number / size + 1))
loader = DataLoader(TensorDataset(*samples()), batch_size=BATCH // size)
plain = model
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
for number, (values, classes) in enumerate(loader, 1):
    accelerator.backward(F.cross_entropy(model(values), classes))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if number == 3:
        accelerator.save_state("old")
        at_save = cloned(plain.state_dict()), named_states(plain, optimizer.optimizer)
expect(at_save, plain.state_dict())
"""
LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = built()
    def training_step(self, batch, number):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": decaying(optimizer), "interval": "step"}]

saves = ModelCheckpoint(dirpath=".", every_n_train_steps=3, save_top_k=-1, filename="{step}")
trainer = lightning.Trainer(
    max_steps=6, accelerator="cpu", logger=False, callbacks=[saves], precision="64-true",
    enable_progress_bar=False,
)
module = Module()
trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=BATCH))
os.rename("step=3.ckpt", "old.ckpt")
saved = torch.load("old.ckpt", weights_only=False)
model = {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}
names = [name for name, _ in module.net.named_parameters()]
states = saved["optimizer_states"][0]["state"]
expect((model, {names[key]: value for key, value in states.items()}), module.net.state_dict())
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = built()
    def forward(self, values, labels):
        scores = self.net(values)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}

class Ordered(Trainer):
    def _get_train_sampler(self, *arguments):
        return torch.utils.data.SequentialSampler(self.train_dataset)

options = TrainingArguments(
    "out", max_steps=6, save_steps=3, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
    learning_rate=0.01, weight_decay=0.01, max_grad_norm=0.0,
)
model = Model()
rows = [{"values": x, "labels": y} for x, y in zip(*samples())]
trainer = Ordered(model, options, train_dataset=rows)
trainer.train()
os.rename("out/checkpoint-3", "old")
from safetensors.torch import load_file
weights = {n.removeprefix("net."): v for n, v in load_file("old/model.safetensors").items()}
saved = torch.load("old/optimizer.pt")
decay = trainer.get_decay_parameter_names(model)
names = [n for n, _ in model.named_parameters()]
order = [n for n in names if n in decay] + [n for n in names if n not in decay]
states = {order[key].removeprefix("net."): value for key, value in saved["state"].items()}
torch.save([n.removeprefix("net.") for n in decay], "decay.pt")
expect((weights, states), model.net.state_dict())
"""
DEEPSPEED = """
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
# Its operation for shared memory would be compiled for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
model = built().float()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
config = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH // size,
    "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=decaying(optimizer), config=config
)

stage = int(sys.argv[1])

def weights():
    if not stage:
        return cloned(model.state_dict())
    found = {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}
    return found | {"count": torch.zeros(1)}

inputs, classes = samples()
share = BATCH // size
for number in range(6):
    here = slice(number * BATCH + rank * share, number * BATCH + (rank + 1) * share)
    engine.backward(F.cross_entropy(engine(inputs[here].float()), classes[here]))
    engine.step()
    if number == 2:
        engine.save_checkpoint("old")
        states = named_states(model, optimizer) if not stage else {
            name: {
                key: safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            }
            for name, parameter in model.named_parameters()
        }
        at_save = weights(), states
expect(at_save, weights())
"""


def run_tool(folder: Path, text: str, *arguments: str, ranks: int = 1) -> Any:
    """Run a script of the tool in `folder`; return the state at its save, and its last weights."""
    (folder / "train.py").write_text(BEGIN + text)
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(starter if ranks > 1 else []), "train.py", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(folder / "expected.pt", weights_only=False)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    more = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    return {**os.environ, **more, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate(ranks: int, world: shoal.World, tmp_path: Path) -> None:
    at_save, end = run_tool(tmp_path, ACCELERATE, ranks=ranks)
    assert_continued(world, tmp_path / "old", tmp_path / "run", at_save, end)


def test_lightning(world: shoal.World, tmp_path: Path) -> None:
    at_save, end = run_tool(tmp_path, LIGHTNING)
    assert_continued(world, tmp_path / "old.ckpt", tmp_path / "run", at_save, end)


def test_trainer(world: shoal.World, tmp_path: Path) -> None:
    at_save, end = run_tool(tmp_path, TRAINER)
    decay = torch.load(tmp_path / "decay.pt")

    def optimizer(model: nn.Module) -> AdamW:
        named = list(model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named if n in decay]},
            {"params": [p for n, p in named if n not in decay], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=0.5)

    def schedule(optimizer: AdamW) -> LambdaLR:
        return LambdaLR(optimizer, lambda number: max(0, 6 - number) / 6)

    old, run = tmp_path / "old", tmp_path / "run"
    assert_continued(world, old, run, at_save, end, optimizer=optimizer, schedule=schedule)


@pytest.mark.parametrize(
    ("stage", "universal"),
    [(0, False), (1, False), (2, False), (3, False), (1, True), (3, True)],
    ids=lambda value: str(value),
)
def test_deepspeed(stage: int, universal: bool, world: shoal.World, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    at_save, end = run_tool(tmp_path, DEEPSPEED, str(stage), ranks=2)
    old = tmp_path / "old"
    if universal:
        folders = ["--input_folder", "old/global_step3", "--output_folder", "universal"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders]
        more = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run([*command, *more], cwd=tmp_path, env=environment(), check=True)
        old = tmp_path / "universal"
    model = built(seed=9).float()
    assert_continued(world, old, tmp_path / "run", at_save, end, within=1e-6, model=model)
