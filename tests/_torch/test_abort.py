"""`_abort_process_group`, which Shoal calls after a failure."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shoal._torch import c10d

pytestmark = pytest.mark.compat


def test_abort_process_groups() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.new_group([0])
    c10d.abort_process_groups()
    assert (dist.is_initialized(), list(c10d.process_groups())) == (False, [])
