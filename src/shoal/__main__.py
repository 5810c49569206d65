"""The command `shoal`; `python -m shoal`, for environments in which it is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. If a package that Shoal needs is missing, print which one, and exit with 2."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, or that of this file; ranks add that of their script
    try:
        from shoal.cli.main import main as run_command

        run_command()
    except (ImportError, OSError) as error:
        from shoal.util.packages import missing_package

        missing = missing_package(error)
        if missing is None:
            raise
        sys.stderr.write(f"{str(missing).strip()}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
