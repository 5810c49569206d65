"""Options of qsub, whose syntax Grid Engine and PBS have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.tools.submit.scheduler import Job
from shoal.util.errors import LaunchError


def qsub_word(given: str, value: str, *, allowed: str = "") -> str:
    """Return a value as one word of an option. Raises LaunchError for a sign that qsub interprets.

    In a file name, it replaces variables, separates hosts by colons and files by commas; colons may be
    `allowed` elsewhere.
    """
    if re.search(r"""[\x00-\x1f\x7f"'\\$:,]""", value.translate(dict.fromkeys(map(ord, allowed)))):
        raise LaunchError(
            given=f"{given} {value!r}",
            found="qsub gives a meaning to quotes, backslashes, dollars, colons and commas",
            fix="use a name without them",
        )
    return f'"{value}"' if " " in value else value


def qsub_name(name: str) -> str:
    """Return a job's name as a word. Raises LaunchError for spaces, which separate columns of qstat."""
    if " " in name:
        raise LaunchError(
            given=f"--name {name!r}",
            found="it has spaces, which separate the columns of qstat",
            fix="use a name without them",
        )
    return qsub_word("--name", name)


def refuse_options(title: str, **options: str | None) -> None:
    """Raise LaunchError for a value of an option of Shoal that the scheduler does not have."""
    for option, value in options.items():
        if value is not None:
            raise LaunchError(
                given=f"--{option} {value}",
                found=f"{title} has no such option",
                fix="use --directive with an option of qsub, such as --directive='-l mem_free=4G'",
            )


def given_options(job: Job, example: str) -> Iterator[str]:
    """Yield the user's options. Raises LaunchError, with an example, for other text."""
    for option in job.options:
        if not re.fullmatch(r"-\w[^\x00-\x1f\x7f]*", option):
            raise LaunchError(
                given=f"--directive {option!r}",
                found="it is not an option of qsub",
                fix=f"write --directive='{example}'",
            )
        yield option
