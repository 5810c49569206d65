"""The process of one variant: starts the ranks of an observed script, as `shoal run` does.

The path of the order is the first argument. The order has the script, its arguments, the number of
ranks and the options of the observer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed.env_vars import placement
from shoal.launcher.entry_point import Script
from shoal.launcher.local import run_job


@dataclass(frozen=True, kw_only=True)
class ObservedScript:
    """A script that a rank runs under observation."""

    path: str
    args: tuple[str, ...]
    folder: str
    root: str
    stop_after: int
    kill_at: int | None
    reverse_files: bool
    trace_at: int | None = None
    micro_batches: int = 1
    safe_path: bool = False

    @property
    def name(self) -> str:
        """The script's name in messages."""
        return self.path

    def run(self) -> None:
        """Install the hooks and run the script as `__main__`."""
        from shoal.tools.verify.hooks import ObserverOptions, install_hooks
        from shoal.tools.verify.listing_order import reverse_listings

        options = ObserverOptions(
            folder=self.folder,
            root=self.root,
            stop_after=self.stop_after,
            kill_at=self.kill_at,
            trace_at=self.trace_at,
            micro_batches=self.micro_batches,
        )
        install_hooks(options, placement().rank)
        if self.reverse_files:
            reverse_listings()
        Script(path=self.path, args=self.args).run()


def main() -> None:
    """Run the order and exit with the code of its ranks."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    processes = order.pop("processes")
    job = ObservedScript(**{**order, "args": tuple(order["args"])})
    sys.exit(run_job(job, processes=processes).code)
