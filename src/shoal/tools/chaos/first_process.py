"""The first process of the namespaces: mounts the tmpfs of all files and runs the storm in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from shoal.tools.chaos.containment import SCRATCH, TEMPORARY
from shoal.tools.chaos.report import StormRequest
from shoal.util.errors import ShoalError
from shoal.util.plain import from_plain

START = "from shoal.tools.chaos.first_process import main; main()"


def main() -> None:
    """Run the request of the first argument and print the report, or the error, as JSON."""
    if os.getpid() != 1:
        raise SystemExit("a storm runs only as the first process of a PID namespace: shoal chaos")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SCRATCH)], check=True)
    TEMPORARY.mkdir()
    # It imports torch, which creates a temporary directory.
    from shoal.tools.chaos.storm import end_processes, run_storm

    request = from_plain(StormRequest, json.loads(sys.argv[1]))
    try:
        report = run_storm(request, Path.cwd(), SCRATCH / "shoal-chaos")
        sys.stdout.write(json.dumps(asdict(report)))
    except ShoalError as error:
        sys.stdout.write(json.dumps(error.texts))
    finally:
        end_processes()
        shutil.rmtree(SCRATCH / "shoal-chaos", ignore_errors=True)
