"""Write the pages of the Python API: `python scripts/write_reference.py`.

Each page is a table of names, which a forge can show, and directives that mkdocstrings expands into
the docstrings. The tests compare the pages with what this script writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shoal

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
STRATEGIES = "Pass an instance to [`shoal.parallelize`](#shoal.parallelize) or to `strategy=` of "
STRATEGIES += "[`shoal.train`](training.md#shoal.train)."


@dataclass(frozen=True)
class Page:
    """A page of the reference: the public names that it describes, in order."""

    file: str
    title: str
    introduction: str
    names: tuple[str, ...]


PAGES = (
    Page(
        "distributed",
        "Processes and layout",
        "Join the processes of a run, and communicate between them.",
        ("init", "launch", "add_launcher", "World", "Layout", "Placement", "Decision"),
    ),
    Page(
        "strategies",
        "Parallelism",
        STRATEGIES,
        (
            "parallelize",
            "samples",
            "SingleProcess",
            "DataParallel",
            "DDP",
            "FSDP",
            "TensorParallel",
            "ContextParallel",
            "ExpertParallel",
            "BalanceLoss",
            "ExpertCapacity",
            "BalancingBias",
            "Pipeline",
            "RPCPipeline",
            "DevicePlacement",
            "ActivationCheckpointing",
            "LocalSGD",
            "DiLoCo",
            "Hogwild",
            "PowerSGD",
            "TopK",
        ),
    ),
    Page(
        "data",
        "Data",
        "Load each sample exactly once per epoch, in the same order at any world size.",
        (
            "Loader",
            "Batch",
            "Permutation",
            "WeightedSampling",
            "TokenBudget",
            "ShardedDataset",
            "LocalBatches",
            "Noise",
            "gather",
            "GatheredRows",
            "Coupled",
            "SampleGroups",
        ),
    ),
    Page(
        "training",
        "Training",
        "Train with one call, or write the loop and let `Step` and `Run` do the rest.",
        (
            "train",
            "TrainingStatus",
            "TrainResult",
            "Task",
            "Step",
            "StepResult",
            "LRSchedule",
            "EMA",
            "Run",
            "Guards",
            "BadSteps",
            "YoungDaly",
            "load_plan",
            "SavedPlan",
            "TensorBoard",
            "WandB",
            "MLflow",
            "Comet",
            "Trackio",
        ),
    ),
    Page(
        "evaluation",
        "Evaluation and files",
        "Evaluate a model over all ranks, export it, and check a run afterwards.",
        ("evaluate", "Validation", "Accuracy", "export", "load", "coverage"),
    ),
    Page(
        "errors",
        "Errors",
        "Every error that Shoal raises is a `ShoalError` and says what was given, what was found "
        "and how to fix it. [Error messages](../../troubleshooting/errors.md) explains the commonest.",
        (
            "ShoalError",
            "LaunchError",
            "LayoutError",
            "DataError",
            "StepError",
            "CheckpointError",
            "AgreementError",
            "CorruptionError",
        ),
    ),
)
BUILT_BY_SHOAL = {"World", "Placement", "Batch"}
"""Classes whose constructors users do not call."""
MEMBERS = {
    "World": (
        *("is_rank_zero", "mesh", "data_group", "all_reduce", "gather", "broadcast", "barrier"),
        *("agree", "rank_zero_first", "generator", "seed_for", "reseed", "print", "log", "close"),
    ),
    "Placement": (),
    "Batch": ("micro", "noise", "gather", "backward", "finish", "averaged"),
    "Loader": ("position", "consumed", "epoch", "epochs", "state_dict", "load_state_dict"),
    "Step": ("__call__", "infer"),
    "Pipeline": ("timetable",),
    "Task": (),
    "Validation": (),
}
"""The methods and properties that users read, of classes that have others for the rest of Shoal."""
CONTRACTS = {"apply", "spread", "divide", "open"}
"""Methods by which Shoal calls strategies and trackers."""


def members(name: str) -> list[str]:
    """Return the methods and properties of a public class that its page describes."""
    public = getattr(shoal, name)
    if not inspect.isclass(public) or issubclass(public, Exception):
        return []
    if name in MEMBERS:
        return list(MEMBERS[name])
    return [
        member
        for member, value in vars(public).items()
        if not member.startswith("_") and member not in CONTRACTS
        if inspect.isroutine(value) or isinstance(value, property)
    ]


def callables() -> Iterator[tuple[str, Any]]:
    """Yield each function, constructor and method that the reference describes, with its name."""
    for page in PAGES:
        for name in page.names:
            public = getattr(shoal, name)
            error = inspect.isclass(public) and issubclass(public, Exception)
            if name not in BUILT_BY_SHOAL and not error:
                yield name, public
            for member in members(name):
                if callable(method := getattr(public, member)):
                    yield f"{name}.{member}", method


def summary(name: str) -> str:
    """Return the first sentence of the docstring of a public name."""
    first = (inspect.getdoc(getattr(shoal, name)) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", r"\|")


def directive(name: str) -> str:
    """Return the lines from which mkdocstrings writes the section of a name."""
    lines = [f"::: shoal.{name}"]
    public = getattr(shoal, name)
    options = []
    if inspect.isclass(public):
        options += [f"members: [{', '.join(members(name))}]"]
        if name in BUILT_BY_SHOAL or issubclass(public, Exception):
            options += ["show_signature: false"]
    if options:
        lines += ["    options:", *(f"      {option}" for option in options)]
    return "\n".join(lines)


def write_page(page: Page) -> str:
    """Return the text of one page."""
    sections = "\n\n".join(directive(name) for name in page.names)
    return f"# {page.title}\n\n{page.introduction}\n\n{sections}\n"


def write_index() -> str:
    """Return the text of the page that lists all names."""
    parts = [
        "# Python API\n\nThe public names of Shoal, all of them attributes of `shoal`. The site shows "
        "the parameters, results, errors and an example of each, from its docstring. In a shell, "
        "`python -c 'import shoal; help(shoal.Loader)'` prints the same text."
    ]
    for page in PAGES:
        rows = [
            f"| [`shoal.{name}`](python/{page.file}.md#shoal.{name}) | {summary(name)} |"
            for name in page.names
        ]
        table = "\n".join(("| name | summary |", "|---|---|", *rows))
        parts.append(f"## [{page.title}](python/{page.file}.md)\n\n{table}")
    return "\n\n".join(parts) + "\n"


def texts() -> dict[Path, str]:
    """Return the text of each file."""
    pages = {FOLDER / "python" / f"{page.file}.md": write_page(page) for page in PAGES}
    return {FOLDER / "python.md": write_index(), **pages}


def main() -> None:
    """Write the files."""
    for path, text in texts().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
