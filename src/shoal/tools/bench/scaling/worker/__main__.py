"""The script of a job whose model is not a script: its argument is the file with the options.

It is in a separate directory, in which no file hides a module of the user from imports.
"""

from __future__ import annotations

import sys

from shoal.tools.bench.scaling.worker import train_worker

if __name__ == "__main__":
    train_worker(sys.argv[1])
