from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

# Runs in a fresh process: imports the package, then says what that did and what it exports.
PROBE = """
import json, os, signal, sys, threading, types

def state():
    return {
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(n)) for n in signal.valid_signals()],
        "threads": [t.name for t in threading.enumerate()],
        "working directory": os.getcwd(),
    }

before = state()
import shoal
after = state()
faults = [f"import shoal changes the {key}" for key in before if before[key] != after[key]]
if "torch" in sys.modules:
    faults.append("import shoal imports torch")

for name in getattr(shoal, "__all__", ()):
    try:
        value = getattr(shoal, name)
    except (AttributeError, ImportError):
        faults.append(f"{name} does not resolve")
        continue
    described = isinstance(value, type | types.FunctionType | types.ModuleType)
    words = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", "")
    # A dataclass without words gets its signature as docstring.
    if described and (not words or words.startswith(f"{name}(")):
        faults.append(f"{name} has no docstring")
json.dump(faults, sys.stdout)
"""


def faults(source: Path) -> list[str]:
    """What is wrong with the public API of the package `shoal` in the folder `source`."""
    init = ast.parse((source / "shoal" / "__init__.py").read_text())
    exported = [
        target.id
        for node in init.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    # A package that holds its docstring alone has nothing to export yet.
    if len(init.body) > 1 and "__all__" not in exported:
        return ["__all__ is missing"]
    # -I and an explicit path: neither an installed copy nor the caller's environment is seen.
    code = f"import sys\nsys.path.insert(0, {str(source)!r})\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code], capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_the_public_api_is_sound(repository: Path) -> None:
    assert faults(repository / "src") == []


@pytest.mark.parametrize(
    ("init", "fault"),
    [
        ('"""Words."""\nx = 1', "__all__ is missing"),
        ('__all__ = ["gone"]', "gone does not resolve"),
        (
            '__all__ = ["A"]\ndef __getattr__(name):\n    from shoal.gone import A\n    return A',
            "A does not resolve",
        ),
        ('__all__ = ["f"]\ndef f(): pass', "f has no docstring"),
        ('__all__ = ["A"]\nclass A: pass', "A has no docstring"),
        (
            'import dataclasses\n__all__ = ["A"]\n@dataclasses.dataclass\nclass A:\n    x: int',
            "A has no docstring",
        ),
        (
            '__all__ = ["A"]\nclass B:\n    """Words."""\nclass A(B): pass',
            "A has no docstring",
        ),
        ("__all__ = []\nimport torch", "import shoal imports torch"),
        ("__all__ = []\nimport os; os.environ['A'] = '1'", "import shoal changes the environment"),
        (
            "__all__ = []\nimport signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
            "import shoal changes the signals",
        ),
    ],
)
def test_faults_are_named(tmp_path: Path, init: str, fault: str) -> None:
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "__init__.py").write_text(init)
    (tmp_path / "torch.py").write_text("")
    assert faults(tmp_path) == [fault]


def test_lazy_names_and_constants_pass(tmp_path: Path) -> None:
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "__init__.py").write_text(
        '__all__ = ["f", "VERSION"]\nVERSION = "1"\n'
        "def __getattr__(name):\n"
        "    def f():\n"
        '        """Words."""\n'
        "    return f\n"
    )
    assert faults(tmp_path) == []


def test_no_public_name_is_hidden_by_a_module(repository: Path) -> None:
    # Importing a module binds its name in the package, in place of what __getattr__ would find.
    modules = {path.stem for path in (repository / "src/shoal").iterdir()}
    assert modules & set(shoal.__all__) == set()


def test_a_misspelled_name_is_reported() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Loder'"):
        shoal.Loder  # type: ignore[attr-defined]  # noqa: B018
