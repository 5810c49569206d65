"""Examples below the help of a command."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """Return the epilog of a command's help with these command lines, one paragraph each."""
    return "\n\n".join(("Examples:", *(f"  {command}" for command in commands)))
