"""Audits of the scripts of `tests/verify/scripts`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from helpers.forked_runs import ForkedRuns
from shoal.tools.verify.audit import AuditReport, audit_script
from shoal.tools.verify.progress import VerifyProgress
from shoal.tools.verify.run_servers import RunServers
from shoal.tools.verify.variants import VerifyRequest

SCRIPTS = Path(__file__).parents[1] / "verify" / "scripts"


def audit(
    home: Path,
    script: str,
    *args: str,
    ranks: tuple[int, ...] = (1, 2),
    kills: int = 0,
    restart_args: tuple[str, ...] = (),
    steps: int = 12,
    servers: RunServers | None = None,
) -> AuditReport:
    """Audit a script in the current directory, whose runs have `steps` steps at most."""
    scratch = home.parent / "scratch"
    scratch.mkdir()
    request = VerifyRequest(
        script=script,
        args=args,
        restart_args=restart_args,
        ranks=ranks,
        kills=kills,
        steps=steps,
        scratch=scratch,
        limit=300.0,
    )
    return audit_script(request, servers or ForkedRuns(), unseen())


def unseen() -> VerifyProgress:
    """Return a progress that is not shown."""
    return VerifyProgress(Console(file=io.StringIO()))
