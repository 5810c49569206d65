"""Parameters and modules that are distributed over the `expert` axis."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.strategies.dtensor import is_divided

ATTRIBUTE = "_shoal_experts"


def over_experts(parameter: Tensor) -> bool:
    """Return whether a parameter is distributed over the `expert` axis."""
    return is_divided(parameter) and "expert" in (parameter.device_mesh.mesh_dim_names or ())


def divided_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that are distributed over ranks."""
    return [module for module in model.modules() if hasattr(module, ATTRIBUTE)]
