"""`python -m shoal`, for environments in which the command is not on the path."""

from __future__ import annotations

from shoal.cli.main import main

if __name__ == "__main__":
    main()
