"""The script of a job whose model is no script: its argument is the file that says what to do.

Beside it lies nothing that an import could take for a module of the user's.
"""

from __future__ import annotations

import sys

from shoal.bench.scaling.worker import train_worker

if __name__ == "__main__":
    train_worker(sys.argv[1])
