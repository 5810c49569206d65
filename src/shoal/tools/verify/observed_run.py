"""The process of one variant: starts the ranks of an observed script, as `shoal run` does.

The path of the order is the first argument. The order has the fields of an ObservedScript, and the
number of ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed.env_vars import placement
from shoal.launcher.entry_point import Script
from shoal.launcher.local import run_job
from shoal.tools.verify.observations import ObserverOptions
from shoal.util.plain import from_plain


@dataclass(frozen=True, kw_only=True)
class ObservedScript(Script):
    """A script that a rank runs under observation."""

    observer: ObserverOptions
    reverse_files: bool

    def run(self) -> None:
        """Install the hooks and run the script as `__main__`."""
        from shoal.tools.verify.hooks import install_hooks
        from shoal.tools.verify.observed_calls import reverse_listings

        install_hooks(self.observer, placement().rank)
        if self.reverse_files:
            reverse_listings()
        super().run()


def read_order(path: Path) -> tuple[ObservedScript, int]:
    """Return the script of an order, and the number of ranks."""
    order = json.loads(path.read_text(encoding="utf-8"))
    return from_plain(ObservedScript, order["script"]), order["processes"]


def main() -> None:
    """Run the order and exit with the code of its ranks."""
    job, processes = read_order(Path(sys.argv[1]))
    sys.exit(run_job(job, processes=processes).code)
