"""Audits of the scripts of `tests/verify/scripts`."""

from __future__ import annotations

from pathlib import Path

from shoal.tools.verify.audit import AuditReport, audit_script
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
    return audit_script(request, lambda _: None)
