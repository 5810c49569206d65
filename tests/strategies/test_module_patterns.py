"""The modules that FSDP and ActivationCheckpointing choose."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shoal
from shoal.strategies.module_patterns import find_units


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.ReLU())


class Stages(nn.Module):
    """Blocks in lists in a list, as models with stages have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))


def test_blocks_in_lists_of_lists_are_found() -> None:
    model = Stages()
    first, second = (list(stage.children()) for stage in model.stages.children())
    assert find_units(model, None) == first + second
    assert find_units(model, ["stages.1.*"]) == second


def test_a_list_is_refused() -> None:
    with pytest.raises(shoal.StepError) as caught:
        find_units(Stages(), ["stages.0"])
    assert caught.value.given == "modules=['stages.0']"
    assert caught.value.found.startswith("stages.0 is a ModuleList")
    assert '"stages.0.*"' in caught.value.fix


@pytest.mark.parametrize(("modules", "fix"), [("stages.*.*", "stages.*.*"), (3, "blocks.*")])
def test_one_name_is_not_a_sequence(modules: Any, fix: str) -> None:
    with pytest.raises(shoal.StepError) as caught:
        find_units(Stages(), modules)
    assert caught.value.found == "it is not a sequence of names"
    assert caught.value.fix == f'use modules=("{fix}",)'
