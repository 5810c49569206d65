"""The migration guides: pages show their scripts, scripts run, and both of a pair end with one loss."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.guide_pages import printed

pytestmark = pytest.mark.processes

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migration"
SCRIPTS = PAGES / "scripts"
ALONE = [sys.executable]
SHOAL = [sys.executable, "-m", "shoal", "run", "-n"]
CPU = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# In float64 nothing but the order of the samples is left that two scripts could differ by.
DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"

# A sampler with Shoal's order: batch k of two ranks is then batch k of both.
ORDERED = """
import shoal
from torch.utils.data import DistributedSampler


class Ordered(DistributedSampler):
    passes = 0

    def __iter__(self):
        order = shoal.Permutation(len(self.dataset), seed=0, epoch=self.passes)
        self.passes += 1
        return iter(list(order)[self.rank :: self.num_replicas])


"""


@dataclass(frozen=True)
class Pair:
    """The script of another tool, the script for Shoal, and how the first gets the second's order."""

    page: str
    before: str
    after: str
    in_order: tuple[tuple[str, str], ...]
    samples: int = 960
    starts_ranks: bool = False
    """Whether the first one takes the number of processes and starts them itself."""
    options: tuple[str, ...] = ()


DDP = Pair(
    "ddp",
    "ddp_before.py",
    "ddp_after.py",
    (("sampler = DistributedSampler(data)", "sampler = Ordered(data)"),),
    samples=1000,
)
CUSTOM_LOOP = Pair("ddp", "ddp_before.py", "ddp_after_custom_loop.py", DDP.in_order, samples=1000)
ACCELERATE = Pair(
    "accelerate",
    "accelerate_before.py",
    "accelerate_after.py",
    (("per_device, shuffle=True", "per_device, sampler=Ordered(training, 1, 0)"),),
    samples=1200,
)
LIGHTNING = Pair(
    "lightning",
    "lightning_before.py",
    "lightning_after.py",
    (
        ("devices, shuffle=True", "devices, sampler=Ordered(training, devices, trainer.global_rank)"),
        ("max_epochs=10", "max_epochs=10, use_distributed_sampler=False"),
    ),
    samples=1200,
    starts_ranks=True,
)
FABRIC = Pair(
    "lightning",
    "fabric_before.py",
    "fabric_after.py",
    (
        ("devices, shuffle=True", "devices, sampler=Ordered(data, devices, fabric.global_rank)"),
        ("setup_dataloaders(loader)", "setup_dataloaders(loader, use_distributed_sampler=False)"),
    ),
    starts_ranks=True,
)
HF_TRAINER = Pair(
    "hf-trainer",
    "hf_trainer_before.py",
    "hf_trainer_after.py",
    (
        (
            "trainer.train()",
            "trainer._get_train_sampler = lambda *_: Ordered(training, 1, 0)\ntrainer.train()",
        ),
        # Without it the gradient is multiplied by processes x accumulation, as the page says.
        ("trainer = Trainer(", "model.accepts_loss_kwargs = False\ntrainer = Trainer("),
    ),
    samples=1200,
)
DEEPSPEED = Pair(
    "deepspeed",
    "deepspeed_before.py",
    "deepspeed_after.py",
    (
        (
            "deepspeed.init_distributed()",
            "deepspeed.runtime.dataloader.DistributedSampler = Ordered\ndeepspeed.init_distributed()",
        ),
    ),
    options=("--deepspeed", "--deepspeed_config", "ds_config.json"),
)
FSDP2 = Pair("fsdp2", "fsdp2_before.py", "fsdp2_after.py", DDP.in_order)
TOOLS = (ACCELERATE, LIGHTNING, FABRIC, HF_TRAINER)
PAIRS = [DDP, CUSTOM_LOOP, ACCELERATE, LIGHTNING, FABRIC, HF_TRAINER, DEEPSPEED, FSDP2]


def marked(**marks: pytest.MarkDecorator) -> list[Any]:
    """All pairs: those named with a mark of their own, the others with peers or as long."""
    return [
        pytest.param(
            pair,
            marks=marks.get(
                pair.after.removesuffix(".py"),
                pytest.mark.peers if pair in TOOLS else pytest.mark.long,
            ),
            id=pair.after,
        )
        for pair in PAIRS
    ]


def diff(pair: Pair) -> str:
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in (pair.before, pair.after))
    lines = difflib.unified_diff(before, after, pair.before, pair.after, n=2, lineterm="")
    return "\n".join(lines) + "\n"


def changed(pair: Pair) -> tuple[int, ...]:
    """The lines that the diff adds and removes; empty ones are not counted."""
    lines = diff(pair).splitlines()[2:]
    return tuple(sum(line[0] == sign and line[1:].strip() != "" for line in lines) for sign in "+-")


def run_script(folder: Path, pair: Pair, processes: int, edit: Callable[[str], str] | None) -> float:
    """The loss over all data of the model that a script saves: Shoal's, or with `edit` the other."""
    folder.mkdir()
    (folder / "ds_config.json").write_text((SCRIPTS / "ds_config.json").read_text())
    text = (SCRIPTS / (pair.after if edit is None else pair.before)).read_text()
    (folder / "script.py").write_text(DOUBLE + (text if edit is None else edit(text)))
    alone = processes == 1 and edit is None
    own = edit is not None and pair.starts_ranks
    command = [*(ALONE if alone or own else [*SHOAL, str(processes)]), "script.py"]
    options = () if edit is None else (str(processes),) if own else pair.options
    printed([*command, *options], folder, **CPU)
    return loss_of_saved(folder, pair)


def loss_of_saved(folder: Path, pair: Pair) -> float:
    with torch.random.fork_rng(), torch.no_grad(), default_dtype(torch.float64):
        torch.manual_seed(0)
        if pair is HF_TRAINER:
            from transformers import BertForSequenceClassification

            tokens = torch.randint(0, 50, (pair.samples, 12))
            model = BertForSequenceClassification.from_pretrained(
                folder / "model", dtype=torch.float64
            ).eval()
            return F.cross_entropy(model(tokens).logits, tokens[:, 0] % 5).item()
        inputs = torch.randn(pair.samples, 20)
        labels = (inputs @ torch.randn(20, 5)).argmax(1)
        state = torch.load(folder / "model.pt", weights_only=True)
        if pair is FSDP2:
            return F.cross_entropy(residual(state, inputs), labels).item()
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
        model.load_state_dict(state)
        return F.cross_entropy(model(inputs), labels).item()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def residual(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network of the scripts for FSDP2, from its state_dict."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    x = linear("first", x)
    for block in range(4):
        x = x + linear(f"layers.{block}.narrow", F.relu(linear(f"layers.{block}.wide", x)))
    return linear("head", x)


def in_order(pair: Pair) -> Callable[[str], str]:
    """Put the samples of the other tool's script in Shoal's order."""

    def edit(text: str) -> str:
        for old, new in pair.in_order:
            assert text.count(old) == 1
            text = text.replace(old, new)
        return ORDERED + text

    return edit


def test_a_page_shows_both_scripts_or_their_diff() -> None:
    for pair in PAIRS:
        text = (PAGES / f"{pair.page}.md").read_text()
        for name in (pair.before, pair.after):
            if pair is not FABRIC:
                assert f"```py\n{(SCRIPTS / name).read_text()}```\n" in text, name
        if pair is FABRIC:
            assert f"```diff\n{diff(pair)}```\n" in text


def test_the_loss_and_the_optimizer_for_a_language_model_are_what_the_page_says() -> None:
    page = (PAGES / "hf-trainer.md").read_text()
    code = next(
        block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "[:, 1:]" in block
    )
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(code, names)
    labels = torch.randint(0, 7, (3, 5))
    labels[0, 3:] = -100
    logits = torch.randn(3, 5, 7)
    total, count = names["loss"](SimpleNamespace(logits=logits), {"labels": labels})
    mean = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
    assert (total / count).item() == pytest.approx(mean.item())
    groups = names["adamw"](nn.Linear(2, 3)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.01), (1, 0.0)]


def test_lines_are_as_few_as_the_index_says() -> None:
    for pair in PAIRS:
        row = next(
            line
            for line in (PAGES / "index.md").read_text().splitlines()
            if f"(scripts/{pair.after})" in line
        )
        said = re.findall(r"\| (\d+) ", row)
        assert tuple(map(int, said)) == changed(pair)


def test_every_script_belongs_to_a_page_and_compiles() -> None:
    scripts = {path.name for path in SCRIPTS.glob("*.py")}
    assert scripts == {name for pair in PAIRS for name in (pair.before, pair.after)}
    for name in scripts:
        compile((SCRIPTS / name).read_text(), name, "exec")


def test_the_deepspeed_config_is_on_its_page_and_fits_its_script() -> None:
    text = (SCRIPTS / "ds_config.json").read_text()
    config = json.loads(text)
    assert f"```json\n{text}```\n" in (PAGES / "deepspeed.md").read_text()
    assert config["train_batch_size"] % (2 * config["gradient_accumulation_steps"]) == 0
    steps = config["scheduler"]["params"]["total_num_steps"]
    assert steps == 10 * DEEPSPEED.samples // config["train_batch_size"]


@pytest.mark.parametrize("pair", marked())
def test_the_shoal_script_ends_the_same_on_one_and_two_processes(pair: Pair, tmp_path: Path) -> None:
    one = run_script(tmp_path / "one", pair, 1, None)
    assert one < 0.5  # from ln 5 on: it has learned, so that the same is not nothing
    assert run_script(tmp_path / "two", pair, 2, None) == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("pair", [pair for pair in marked() if pair.values[0] is not DEEPSPEED])
def test_with_the_samples_in_one_order_both_end_with_one_loss(pair: Pair, tmp_path: Path) -> None:
    before = run_script(tmp_path / "before", pair, 2, in_order(pair))
    assert run_script(tmp_path / "after", pair, 2, None) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize(
    "pair",
    [pair for pair in marked(ddp_after=pytest.mark.full) if pair.values[0] is not DEEPSPEED],
)
def test_the_script_of_the_other_tool_runs_as_the_page_shows_it(pair: Pair, tmp_path: Path) -> None:
    """It shuffles in a different order, so its loss differs."""
    assert run_script(tmp_path / "before", pair, 2, str) < 0.5
