"""The cells of docs/migration/comparison.md: samples and gradients of each tool on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.guide_pages import printed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HEAD = """
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index + 1)]), index


def new_net():
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    return net


def loss(output, x):
    return ((output - 3 * x) ** 2).mean()


def report(rank, indices, gradient=None, counted=None):
    with open(f"rank-{rank}.json", "w") as file:
        json.dump({"indices": indices, "gradient": gradient, "counted": counted}, file)


length = int(sys.argv[1])
"""

SCRIPTS = {
    "ddp": """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
net = new_net()
model = nn.parallel.DistributedDataParallel(net)
data = Numbers(length)
seen = []
for x, index in DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)):
    seen += index.tolist()
    net.zero_grad()
    loss(model(x), x).backward()
counted = torch.tensor(len(seen))
dist.all_reduce(counted)
report(dist.get_rank(), seen, net.weight.grad.item(), counted.item())
dist.destroy_process_group()
""",
    "accelerate": """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net = new_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model, loader = accelerator.prepare(net, DataLoader(Numbers(length), 2))
seen, counted = [], 0
for x, index in loader:
    seen += index.tolist()
    net.zero_grad()
    accelerator.backward(loss(model(x), x))
for x, index in loader:
    counted += len(accelerator.gather_for_metrics(index))
report(accelerator.process_index, seen, net.weight.grad.item(), counted)
accelerator.end_training()
os._exit(0)  # the interpreter's shutdown sometimes aborts on a busy machine, in a thread of torch
""",
    "lightning": """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = new_net()
        self.seen, self.counted = [], 0

    def training_step(self, batch, _):
        self.seen += batch[1].tolist()
        return loss(self.net(batch[0]), batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.net.weight.grad.item()

    def validation_step(self, batch, _):
        self.counted += len(batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
)
module = Module()
loader = DataLoader(Numbers(length), 2)
trainer.fit(module, loader, DataLoader(Numbers(length), 2))
counted = trainer.strategy.reduce(torch.tensor(float(module.counted)), reduce_op="sum")
report(trainer.global_rank, module.seen, module.gradient, int(counted))
""",
    "shoal": """
import shoal


class InOrder:
    def __len__(self):
        return length

    def take(self, positions, *, seed, epoch):
        return positions % length


with shoal.init() as world:
    net = new_net()
    model = shoal.parallelize(net, world)
    loader = shoal.Loader(Numbers(length), world, batch_size=4, order=InOrder())
    seen = []
    for batch in loader.epochs(1):
        net.zero_grad()
        for x, index in batch:
            seen += index.tolist() if batch.micro.weight else []  # not the padding sample
            batch.backward(mean=loss(model(x), x), count=len(x))
        batch.finish(model)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)), inputs=lambda batch: batch[0])
    result = shoal.evaluate(model, Numbers(length), task=task)
    report(world.rank, seen, net.weight.grad.item(), int(result["samples"]))
""",
}


def ranks(tool: str, length: int, folder: Path) -> list[dict[str, Any]]:
    """Run a tool's script on two ranks; return the samples and the last gradient of each."""
    (folder / "script.py").write_text(HEAD + SCRIPTS[tool])
    launch = [] if tool == "lightning" else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    printed([sys.executable, *launch, "script.py", str(length)], folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


EXPECTED = {  # equal to one process, each sample once, samples counted
    "shoal": (True, True, 101),
    "ddp": (False, False, 102),
    "accelerate": (False, False, 101),
    "lightning": (False, False, 102),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(tool, marks=pytest.mark.full if tool in ("shoal", "ddp") else pytest.mark.peers)
        for tool in EXPECTED
    ],
)
def tool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(tool: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(tool, 101, tmp_path_factory.mktemp(tool))


def test_gradient_of_a_ragged_batch(tool: str, found: list[dict[str, Any]]) -> None:
    """The last global batch of 101 samples by 4 holds sample 101 alone."""
    one_process = 2 * (1 - 3) * 101.0**2
    equal = found[0]["gradient"] == pytest.approx(one_process, rel=1e-6)
    assert equal is EXPECTED[tool][0]


def test_samples_of_an_epoch_and_of_an_evaluation(tool: str, found: list[dict[str, Any]]) -> None:
    seen = sorted(found[0]["indices"] + found[1]["indices"])
    assert (seen == list(range(101))) is EXPECTED[tool][1]
    assert found[0]["counted"] == EXPECTED[tool][2]


def test_the_readme_has_the_table_of_the_page(repository: Path) -> None:
    def rows(name: str) -> list[str]:
        lines = (repository / name).read_text().splitlines()
        begin = next(i for i, line in enumerate(lines) if "| Shoal | DDP + torchrun |" in line)
        return lines[begin + 1 : begin + 10]

    assert rows("README.md") == rows("docs/migration/comparison.md")
