"""The names that torch and other tools give to what a World has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_NAMES = {
    "all_gather": "gather",
    "global_rank": "rank",
    "is_global_zero": "is_rank_zero",
    "is_main_process": "is_rank_zero",
    "local_process_index": "placement.local_rank",
    "local_rank": "placement.local_rank",
    "num_processes": "size",
    "process_index": "rank",
    "wait_for_everyone": "barrier",
    "world_size": "size",
}


class OtherNames:
    """A base of World, whose AttributeError for a name of another tool has Shoal's name."""

    if not TYPE_CHECKING:  # type checkers would accept all names

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError."""
            if name not in _NAMES:
                return object.__getattribute__(self, name)  # raises the error of that name again
            found = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{found}; did you mean world.{_NAMES[name]}?")
