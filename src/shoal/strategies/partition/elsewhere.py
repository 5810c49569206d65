"""Modules of stages on other ranks."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from shoal.util.errors import StepError

NOT_HERE = "each rank has only some of the stages of the model"
RETURN_IT = "compute it in the forward of the model, return it, and use the output in the loss"


class Elsewhere(nn.Module):
    """The module `name` of `model`, which another rank has. Raises StepError if it is used."""

    def __init__(self, model: str, name: str) -> None:
        super().__init__()
        self._given = f"{name} of {model}, whose stages are on different ranks"

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Raise StepError."""
        raise StepError(given=f"a direct call of {self._given}", found=NOT_HERE, fix=RETURN_IT)

    def __getattr__(self, name: str) -> Any:
        """Raise StepError."""
        raise _ElsewhereError(given=f"{name} of {self._given}", found=NOT_HERE, fix=RETURN_IT)


class _ElsewhereError(StepError, AttributeError):
    """The StepError of a missing attribute, with which `hasattr` returns False."""
