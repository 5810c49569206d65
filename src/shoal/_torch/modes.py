"""Private names of torch's function modes: the device on which a script has torch create tensors."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def default_device() -> torch.device | None:
    """Return the device of `torch.set_default_device` or `with torch.device(...)`; None without one.

    `torch.get_default_device` gives the CPU then, and a GPU's number where the script gave none.
    """
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
