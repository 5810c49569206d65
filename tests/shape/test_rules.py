from __future__ import annotations

from pathlib import Path

import pytest

from helpers import rules

CODE = ("src", "tests", "examples", "benchmarks")


@pytest.mark.parametrize("folder", CODE)
def test_files_fit_in_a_head(repository: Path, folder: str) -> None:
    assert list(rules.long_files(repository / folder)) == []


@pytest.mark.parametrize("folder", CODE)
def test_functions_fit_on_a_screen(repository: Path, folder: str) -> None:
    assert list(rules.long_functions(repository / folder)) == []


def test_names_of_classes_and_functions_can_be_searched(repository: Path) -> None:
    assert list(rules.repeated_classes(repository / "src/shoal")) == []
    assert list(rules.vague_functions(repository / "src/shoal")) == []


def test_repeated_and_vague_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Job: ...\ndef read(): ...\n")
    (tmp_path / "b.py").write_text("class Job:\n    def read(self): ...\nclass Other: ...\n")
    assert list(rules.repeated_classes(tmp_path)) == ["Job: a.py, b.py"]
    assert list(rules.vague_functions(tmp_path)) == ["a.py:2: read"]


def test_only_a_world_assigns_its_attributes(repository: Path) -> None:
    assert list(rules.assigned_worlds(repository / "src/shoal")) == []


@pytest.mark.parametrize(
    "text",
    [
        "world.recorder = log",
        "self.world.directory: Path | None = None",
        "a = self._world.rank = 0",
        "engine.world.steps += 1",
        "(x, world.size) = 0, 1",
        "del world.mesh",
    ],
)
def test_assignments_to_worlds_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.py").write_text(text)
    assert next(rules.assigned_worlds(tmp_path)).startswith("run.py:1: assigns ")
    (tmp_path / "distributed").mkdir()
    (tmp_path / "run.py").rename(tmp_path / "distributed/world.py")
    assert list(rules.assigned_worlds(tmp_path)) == []


@pytest.mark.parametrize(
    "text", ["self.world = world", "rank = world.rank", "world.watchdog.steps = 1"]
)
def test_other_assignments_pass(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.py").write_text(text)
    assert list(rules.assigned_worlds(tmp_path)) == []


def test_the_library_keeps_its_habits(repository: Path) -> None:
    assert list(rules.habits(repository / "src/shoal")) == []


def test_only_the_door_uses_private_names_of_torch(repository: Path) -> None:
    assert list(rules.private_names(repository / "src/shoal")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import DispatchKey",
        "from torch.utils import _pytree as tree",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch\ntorch._foreach_add_(x, y)",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_names",
        "from torch import nn\nnn.Module._apply(model, f)",
        "module._parameters[name] = value",
        "self._call_impl()",
        "self._remaining_restarts += 1",
        "getattr(node, '_forward_cls', None)",
        "tensor.grad_fn._saved_result",
    ],
)
def test_private_names_of_torch_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step.py").write_text(text)
    assert next(rules.private_names(tmp_path)).startswith("step.py:")
    (tmp_path / "_torch").mkdir()
    (tmp_path / "step.py").rename(tmp_path / "_torch/step.py")
    assert list(rules.private_names(tmp_path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "self._parameters = list(model.parameters())\nself._parameters[0]",
        "other._feed, entry._replace(x=1), super()._options()",
        "import torch\ntorch.__version__",
        "from shoal._torch.modules import parameters",
    ],
)
def test_private_names_of_shoal_pass(tmp_path: Path, text: str) -> None:
    (tmp_path / "step.py").write_text(text)
    assert list(rules.private_names(tmp_path)) == []


def test_nothing_is_left_over(repository: Path) -> None:
    assert list(rules.leftovers(repository)) == []


def test_long_files_and_functions_are_named(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text("x = 1\n" * 500)
    (tmp_path / "long.py").write_text("x = 1\n" * 501)
    assert list(rules.long_files(tmp_path)) == ["long.py: 501 lines"]

    docstring = '    """a\n    b\n    """\n'
    (tmp_path / "fits.py").write_text("def f():\n" + docstring + "    x = 1\n" * 69)
    (tmp_path / "long.py").write_text("class A:\n    def f(self):\n" + "        x = 1\n" * 70)
    assert list(rules.long_functions(tmp_path)) == ["long.py:2: f, 71 lines"]


@pytest.mark.parametrize(
    "text",
    [
        "assert x",
        "import pickle",
        "import os, cloudpickle as cp",
        "from pickle import loads",
        "torch.load(path)",
        "save = torch.save",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "print('hello')",
        "os.environ['RANK']",
        "os.getenv('RANK')",
        "from os import environ",
        "[sys.executable, '-c', 'print(1)']",
        "from sys import executable",
        "multiprocessing.get_context('spawn')",
        "from concurrent.futures import ProcessPoolExecutor",
        "import time",
        "from time import sleep",
        "datetime.now(UTC)",
    ],
)
def test_bad_habits_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step.py").write_text(text)
    [found] = rules.habits(tmp_path)
    assert found.startswith("step.py:1: ")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("distributed/env_vars.py", "os.environ['RANK']"),
        ("util/clock.py", "import time; time.sleep(1)"),
        ("cli/main.py", "print('hello')"),
        ("step.py", "self.print(model.load(path)); os.path.exists(path)"),
        ("step.py", "'''We assert nothing and print nothing; os.environ is not read.'''"),
    ],
)
def test_good_habits_pass(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert list(rules.habits(tmp_path)) == []


def test_only_the_top_level_module_reads_the_environment(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "environ.py").write_text("os.environ")
    assert len(list(rules.habits(tmp_path))) == 1


@pytest.mark.parametrize("word", ["/ho" + "me/me/x", "see /ro" + "ot/x", "TO" + "DO", "FIX" + "ME"])
def test_leftovers_are_named(tmp_path: Path, word: str) -> None:
    (tmp_path / ".gitignore").write_text("runs/\n*.egg-info/\n")
    (tmp_path / "kept.md").write_text(f"fine\n{word}\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.txt").write_text(word)
    (tmp_path / "shoal.egg-info").mkdir()
    (tmp_path / "shoal.egg-info" / "x").write_text(word)
    [found] = rules.leftovers(tmp_path)
    assert found.startswith("kept.md:2: ")


def test_addresses_and_templates_are_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / "kept.md").write_text("https://example.org/home/x ~/work/x mktemp " + "X" * 6)
    assert list(rules.leftovers(tmp_path)) == []
