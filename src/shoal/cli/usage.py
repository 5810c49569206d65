"""Errors of a command line: all of them together, as given, found and fix."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.util.errors import LaunchError, ShoalError

UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""Of click, which older versions of typer import and newer ones contain."""

_INDENT = "\n       "
_WORDS = (
    (re.compile(r"valid int"), "not an integer", ""),
    (re.compile(r"valid (?:number|float)"), "not a number", ""),
    (re.compile(r"(?:greater than or equal to |range x>=)([\d.]+)"), r"less than \1", r"\1 or more"),
    (re.compile(r"less than or equal to ([\d.]+)"), r"greater than \1", r"\1 or less"),
)
"""How versions of typer say that a value is wrong; the problem and the fix in Shoal's words."""


def report_all_problems(app: typer.Typer) -> None:
    """Let all commands of an app raise one LaunchError with every problem of a command line."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            report_all_problems(group.typer_instance)


class _Command(TyperCommand):
    """A command that looks at all its options and arguments before it rejects any."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion in a shell
            return super().parse_args(ctx, args)
        typed = list(args)
        problems: list[ShoalError] = []
        wrong: set[str] = set()
        args, (values, rest, order) = self._parse(ctx, args, problems, wrong)
        # Options are checked in the order typed, after those such as --help.
        params = self.get_params(ctx)
        for param in sorted(params, key=lambda each: (not each.is_eager, _place(each, order))):
            if param.name in wrong:
                continue
            try:
                _, rest = param.handle_parse_result(ctx, values, rest)
            except ShoalError as error:
                problems.append(error)
            except UsageError as error:
                problems.append(_explain_value(error, ctx, args, values))
        if rest and not ctx.allow_extra_args:
            problems.append(
                LaunchError(
                    given=shlex.join(rest),
                    found="an argument that the command does not take"
                    if len(rest) == 1
                    else "arguments that the command does not take",
                    fix=_example(ctx),
                )
            )
        if problems:
            raise _combine(problems, " ".join((ctx.command_path, *map(shlex.quote, typed))))
        ctx.args = list(rest)
        return list(rest)

    def _parse(
        self, ctx: Any, args: list[str], problems: list[ShoalError], wrong: set[str]
    ) -> tuple[list[str], Any]:
        """Split a command line, without wrong options, into values, other words and parameters.

        Return the words that were split too. `wrong` gets the names of parameters that lack a value
        or have one too many.
        """
        while True:
            parser = self.make_parser(ctx)
            try:
                return args, parser.parse_args(args=list(args))
            except UsageError as error:
                name = getattr(error, "option_name", None)
                index = next((i for i, word in enumerate(args) if _is_option(word, name)), None)
                if index is None:
                    raise
                param = _options(ctx).get(str(name))
                if param is None:
                    problem, args = _explain_unknown(ctx, args, index)
                else:
                    wrong.add(param.name)
                    problem, args = (
                        _explain_option(param, args[index]),
                        args[:index] + args[index + 1 :],
                    )
                problems.append(problem)


class _Group(TyperGroup):
    """A group of commands whose errors are those of Shoal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            name = getattr(error, "option_name", None)
            if name is None:  # no arguments at all: the help
                raise
            raise _explain_unknown(ctx, [name], 0)[0] from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            script = args[0].endswith(".py") and ctx.parent is None
            fix = f"{ctx.command_path} --help lists the commands"
            if near or script:
                words = (near[0], *args[1:]) if near else ("run", "-n", "2", *args)
                fix = f"{ctx.command_path} {shlex.join(words)}"
            raise LaunchError(
                given=f"{ctx.command_path} {args[0]}", found="no such command", fix=fix
            ) from None


def _combine(problems: list[ShoalError], command: str) -> ShoalError:
    if len(problems) == 1:
        return problems[0]
    return LaunchError(
        given=command,
        found=_INDENT.join(f"{each.given}: {each.found}" for each in problems),
        fix=_INDENT.join(dict.fromkeys(each.fix for each in problems)),
    )


def _explain_option(param: Any, word: str) -> LaunchError:
    """Return the error of an option without its value, or with one that it does not take."""
    name, equals, _ = word.partition("=")
    if equals:
        return LaunchError(given=word, found="the option takes no value", fix=name)
    return LaunchError(
        given=word, found="the option needs a value", fix=f"{name} {param.metavar}: {param.help}"
    )


def _explain_unknown(ctx: Any, args: list[str], index: int) -> tuple[LaunchError, list[str]]:
    """Return the error of an unknown option, and the command line with the option that was meant.

    If no option was meant, the command line is returned without it and its value.
    """
    name, equals, value = args[index].partition("=")
    before, after = args[:index], args[index + 1 :]
    near = _similar(name, list(_options(ctx)))
    if near is not None:
        found = f"no such option; did you mean {near}?"
        return LaunchError(given=name, found=found, fix=near), [*before, near + equals + value, *after]
    fix = f"{ctx.command_path} --help lists the options"
    if not ctx.allow_interspersed_args and not hasattr(ctx.command, "commands"):
        fix = f"options of the script follow its name: {_example(ctx)}; {fix}"
        if not equals and _is_value(after):
            after = after[1:]
    return LaunchError(given=name, found="no such option", fix=fix), [*before, *after]


def _similar(name: str, options: list[str]) -> str | None:
    word = name.strip("-").replace("_", "-")
    long = {option.strip("-"): option for option in options if option.startswith("--")}
    begun = [each for each in long if len(word) > 2 and each.startswith(word)]
    near = begun or get_close_matches(word, long, n=1, cutoff=0.7)
    return long[near[0]] if near else None


def _is_value(words: list[str]) -> bool:
    """Whether the first word seems to be the value of an unknown option, and not the script."""
    if len(words) < 2 or words[0].startswith("-"):
        return False
    return not words[0].endswith(".py") and not os.path.exists(words[0])


def _explain_value(error: Any, ctx: Any, args: list[str], values: dict[str, Any]) -> LaunchError:
    param = error.param
    if param is None:
        return LaunchError(given=ctx.command_path, found=error.format_message(), fix=_example(ctx))
    is_option = param.param_type_name == "option"
    words = (word.partition("=")[0].replace("_", "-") for word in args)
    name = next((word for word in words if word in param.opts), param.opts[0])
    label = name if is_option else str(param.metavar or param.name)
    value = values.get(param.name)
    if value is None:
        return LaunchError(given=ctx.command_path, found=f"{label} is missing", fix=_example(ctx))
    found, bound = str(error.message).rstrip("."), ""
    for pattern, problem, more in _WORDS:
        match = pattern.search(found)
        if match is not None:
            found, bound = f"{value} is {match.expand(problem)}", match.expand(more)
            break
    kind = param.metavar if is_option else ""
    return LaunchError(
        given=f"{name} {value}" if is_option else str(value),
        found=found,
        fix=" ".join(filter(None, (label, bound or kind))) + f": {param.help}",
    )


def _options(ctx: Any) -> dict[str, Any]:
    """Return the options of a command by their names."""
    return {
        name: param
        for param in ctx.command.get_params(ctx)
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    }


def _is_option(word: str, name: str | None) -> bool:
    """Whether a word of the command line is the option that the parser names."""
    if name is None or not word.startswith("-"):
        return False
    if word.partition("=")[0].replace("_", "-") == name.replace("_", "-"):
        return True
    return len(name) == 2 and not word.startswith("--") and name[1] in word[1:]


def _place(param: Any, order: list[Any]) -> int:
    return order.index(param) if param in order else len(order)


def _example(ctx: Any) -> str:
    """Return the first example in the help of a command."""
    return next(_examples(ctx), f"{ctx.command_path} --help")


def _examples(ctx: Any) -> Iterator[str]:
    for line in (ctx.command.epilog or "").splitlines():
        if line.startswith("  "):
            yield line.strip()
