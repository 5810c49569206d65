"""Commands of schedulers: run them, and explain their failures."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.distributed import env_vars
from shoal.util.errors import LaunchError

_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class SchedulerCommands:
    """The commands of a scheduler, whose name for users is `title`.

    `submit` begins a command that submits a job, and `ping` succeeds if the scheduler answers. Messages
    that contain `unreached` mean that this machine belongs to no cluster, or is cut off from it, and
    those that contain `unknown` that a job has never existed or has ended.
    """

    title: str
    submit: str
    ping: str
    unreached: re.Pattern[str]
    unknown: re.Pattern[str]

    def run(self, command: Sequence[str], *, known: bool = True, errors: bool = False) -> str:
        """Run a command and return its output, with `errors` also that to stderr.

        Raises LaunchError if it is missing, reaches no cluster, or fails. If jobs need not be `known`,
        it may fail because the scheduler does not know a job, or no longer knows it.
        """
        to_submit = " ".join(command).startswith(f"{self.submit} ")
        elsewhere = "; `--dry-run` needs none" if to_submit else ""
        try:
            done = subprocess.run(
                command,
                env=env_vars.outside_of_jobs(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except FileNotFoundError:
            raise LaunchError(
                given=" ".join(command[:2]),
                found=f"there is no {command[0]} on this machine's PATH",
                fix=f"run this on a login node{elsewhere}",
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(
                given=" ".join(command),
                found=f"no answer within {_SECONDS:.0f} s: {self.title} is down or overloaded",
                fix=f"try again when `{self.ping}` gets an answer",
            ) from None
        said = done.stderr.strip() or done.stdout.strip()
        if "Traceback (most recent call last)" in said:
            # Ray's commands are Python's: the message follows the last line of code.
            said = re.split(r"\n\s[^\n]*\n(?=\S)", said)[-1]
        if done.returncode and self.unreached.search(said):
            raise LaunchError(
                given=" ".join(command[:2]),
                found=f"{self.title} is installed here but reaches no cluster",
                fix=f"run this on a login node, where `{self.ping}` gets an answer{elsewhere}",
            )
        unknown = all(self.unknown.search(line) for line in said.splitlines())
        if done.returncode and (known or not unknown):
            shown = "; `--dry-run` shows the job's file" if to_submit else ""
            raise LaunchError(
                given=" ".join(command),
                found=said or f"exit code {done.returncode}",
                fix=f"change the option that {self.title} rejects{shown}",
            )
        return done.stdout + (done.stderr if errors else "")

    def find_job(self, printed: str, pattern: str) -> str:
        """Return the id of a job, the last line of `pattern` that `submit` printed.

        A site's wrapper may print more before it. Raises LaunchError if there is none.
        """
        found = re.findall(pattern, printed, re.MULTILINE)
        if not found:
            raise LaunchError(
                given=self.submit,
                found=f"it succeeded, but printed no job number: {printed.strip()[:200]!r}",
                fix="find the job in the queue and cancel it, since its files have been removed",
            )
        return str(found[-1])
