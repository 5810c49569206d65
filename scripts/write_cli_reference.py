"""Write the reference of the command line: `python scripts/write_cli_reference.py`.

The pages docs/reference/cli.md and docs/reference/cli/*.md are made from the definitions of the
commands in shoal.cli. A test fails while a committed page differs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from shoal.cli.main import app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
INTRODUCTIONS = {
    "Train": "Commands that launch training scripts and check the machines on which they run.",
    "Observe": "Commands that read a run directory: progress, reports, checkpoints.",
    "Clusters": "Commands that submit, follow and cancel batch jobs on a cluster.",
    "Plan": "The command that predicts memory, step time and training time.",
    "Measure": "Commands that measure performance.",
    "Verify": "Commands that check whether restarts, ranks or faults change the results of a script.",
}
SEE_ALSO = {
    "Train": (
        "[Launchers](../../clusters/launchers.md) · [Multi-node training](../../clusters/multi-node.md)"
        " · [Preflight checks](../../clusters/preflight.md)"
    ),
    "Observe": (
        "[Live view](../../monitoring/live-view.md) · [Report](../../monitoring/report.md)"
        " · [Checkpoints](../../guides/checkpoints.md)"
    ),
    "Clusters": (
        "[Slurm jobs](../../clusters/slurm.md) · [Slurm reference](../../clusters/slurm-reference.md)"
    ),
    "Plan": (
        "[Plan a training run](../../guides/plan.md)"
        " · [Step time of a module](../../guides/plan-module-time.md)"
        " · [Accuracy](../../guides/plan-accuracy.md)"
    ),
    "Measure": (
        "[Scaling benchmarks](../../monitoring/benchmarks.md)"
        " · [Machine benchmarks](../../monitoring/machine-benchmarks.md)"
        " · [Plan a training run](../../guides/plan.md)"
    ),
    "Verify": (
        "[Verifying a script](../../monitoring/verify.md)"
        " · [Injecting faults](../../monitoring/chaos.md)"
    ),
}
OVERVIEW = """# Command line (CLI)

`shoal` is one command with subcommands. `shoal --help` lists them, and `shoal COMMAND --help`, or \
`-h`, shows the arguments, options and examples of one command. `python -m shoal` is the same command.

{tables}
## Options of shoal

{options}

## Errors

A command line that is not valid ends with [exit code](exit-codes.md) 2 and an error in three parts. \
It reports all problems together:

```
$ shoal run --nproc 0 train.py
given: shoal run --nproc 0 train.py
found: --nproc: no such option; did you mean --nproc-per-node?
       --nproc-per-node 0: 0 is less than 1
fix:   --nproc-per-node
       --nproc-per-node 1 or more: Number of processes on this node; required unless \
the environment names the job's nodes.
```

## See also

[Exit codes](exit-codes.md) · [Environment variables](environment-variables.md) \
· [Cheat sheet](cheat-sheet.md)
"""
KINDS = {"int": "integer", "float": "number", "str": "string", "Path": "path"}


def pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/reference."""
    root: Any = typer.main.get_command(app)
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in root.commands.items():
        panels.setdefault(command.rich_help_panel, []).extend(_leaves(f"shoal {name}", command))
    tables = "\n".join(_overview(panel, commands) for panel, commands in panels.items())
    found = {"cli.md": OVERVIEW.format(tables=tables, options=_options(root.params))}
    for panel, commands in panels.items():
        sections = "\n".join(_section(path, command) for path, command in commands)
        found[_file(panel)] = (
            f"# Command line: {panel}\n\n{INTRODUCTIONS[panel]} "
            f"[Command line](../cli.md) lists all commands.\n\n{sections}\n"
            f"## See also\n\n{SEE_ALSO[panel]}\n"
        )
    return found


def split_default(text: str) -> tuple[str, str]:
    """Separate `(default: …)` at the end of a help text from the rest."""
    match = re.fullmatch(r"(.*) \(default: (.*)\)\.", text, re.DOTALL)
    return (f"{match[1]}.", match[2]) if match else (text, "")


def _file(panel: str) -> str:
    return f"cli/{panel.lower()}.md"


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group, or the command itself, with what one types."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, each in command.commands.items():
        yield from _leaves(f"{path} {name}", each)


def _overview(panel: str, commands: list[tuple[str, Any]]) -> str:
    rows = [
        [f"[`{path}`]({_file(panel)}#{path.replace(' ', '-')})", _paragraphs(command)[0]]
        for path, command in commands
    ]
    return f"## {panel}\n\n{_table(['command', 'purpose'], rows)}\n"


def _section(path: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    words = [path, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)]
    parts = [f"## {path}", *_paragraphs(command), f"```\n{' '.join(words)}\n```"]
    if arguments:
        rows = [[f"`{_metavar(each)}`", _kind(each), _description(each)] for each in arguments]
        parts.append(_table(["argument", "type", "description"], rows))
    if options:
        parts.append(_options(options))
    examples = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
    parts.append("Examples:\n\n```\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(parts) + "\n"


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(each.split()) for each in inspect.cleandoc(command.help).split("\n\n")]


def _usage(argument: Any) -> str:
    name = _metavar(argument).strip("[]").removesuffix("...")
    name += "..." if argument.nargs != 1 else ""
    return name if argument.required else f"[{name}]"


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _options(options: list[Any]) -> str:
    rows = [[_names(each), _value(each), _default(each), _description(each)] for each in options]
    return _table(["option", "value", "default", "description"], rows)


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _value(option: Any) -> str:
    if option.is_flag:
        return "flag"
    return f"`{_metavar(option)}`, {_kind(option)}"


def _kind(param: Any) -> str:
    """Return the type of a value with its bounds, in words."""
    descriptor = param.type_descriptor
    name = getattr(descriptor.annotation, "__name__", "")
    several = name == "list"
    if several:
        name = descriptor.annotation.__args__[0].__name__
    kind = KINDS[name]
    info = descriptor.parameter_info
    least, most = getattr(info, "min", None), getattr(info, "max", None)
    if least is not None:
        kind += f" from {least:.9g} to {most:.9g}" if most is not None else f", {least:.9g} or more"
    if several:
        kind += ", repeatable" if param.param_type_name == "option" else ", any number"
    return kind


def _default(option: Any) -> str:
    _, said = split_default(option.help)
    if option.secondary_opts:
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    if said or option.default is None or option.default is False or option.default == "":
        return said or ("off" if option.is_flag else "none")
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


def _description(param: Any) -> str:
    text, said = split_default(param.help)
    text = param.help if param.param_type_name == "argument" and said else text
    if param.envvar:
        text += f" Environment variable: `{param.envvar}`."
    return text


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    """Write the pages."""
    (FOLDER / "cli").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
