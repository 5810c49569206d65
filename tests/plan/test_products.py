from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal._torch.dispatch import TorchDispatchMode
from shoal.distributed.layout import Layout
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.layers import (
    alignment_factor,
    layer_products,
    product_work,
    tiled_flops,
    transformer_work,
)
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.slowest import slowest
from shoal.tools.plan.work.transformer import Transformer

A100 = find_machine("a100-80")
MODEL = Transformer(hidden=1024, layers=4, heads=8, vocab=50304, seq=1024)
PLAN = PlannedStep(layout=Layout(), global_batch=8, micro_batch=8)


def test_no_product_is_faster_than_its_flops() -> None:
    for shape in ((8192, 8192, 8192), (100, 30, 20), (1, 50257, 768), (4096, 64, 9)):
        rows, columns, inner = shape
        useful = 2 * rows * columns * inner
        assert tiled_flops(*shape, None) == useful
        assert tiled_flops(*shape, 108) >= useful, shape
        assert tiled_flops(*shape, 108) <= tiled_flops(rows, columns, inner + 512, 108), shape


def test_large_products_lose_little_and_a_last_tile_takes_a_round() -> None:
    assert tiled_flops(16384, 16384, 16384, 108) < 1.08 * 2 * 16384**3
    full = tiled_flops(256 * 12, 128 * 9, 4096, 108)
    assert tiled_flops(256 * 12 + 1, 128 * 9, 4096, 108) > 1.1 * full


def test_long_sums_of_small_results_use_all_processors() -> None:
    shape = (512, 512, 65536)
    assert tiled_flops(*shape, 128) < 1.3 * 2 * 512 * 512 * 65536


def test_a_vocabulary_that_is_not_a_multiple_of_eight_is_slower() -> None:
    assert alignment_factor(50304, 2) == alignment_factor(4, 4) == 1
    assert alignment_factor(50257, 2) > 1
    odd = estimate_step(replace(MODEL, vocab=50257), PLAN, A100)
    assert odd.parts["products"] > 1.1 * estimate_step(MODEL, PLAN, A100).parts["products"]


class CountedProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[bool] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.found[str(function).startswith(("aten.addmm", "aten.mm"))] += 1
        return function(*arguments, **(keywords or {}))


def test_recomputation_skips_the_last_product_as_torch_does() -> None:
    for dropout in (0, 1):
        last = [nn.Dropout(0.5)] if dropout else []
        layer = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), *last)
        output = checkpoint(layer, torch.randn(4, 8, requires_grad=True), use_reentrant=False)
        with CountedProducts() as counted:
            output.sum().backward()
        gradients = 2 * 2
        recomputed = counted.found[True] - gradients
        assert recomputed == 1 + dropout
        model = replace(MODEL, dropout=dropout)
        plan = replace(PLAN, recompute="full")
        work = transformer_work(model, plan, A100.units)
        skipped = work.forward.products - work.recompute.products
        shape = layer_products(model, plan)[-1]
        one = product_work(shape, plan.numbers.activation, A100.units).products
        assert skipped == (0 if dropout else one)


def test_the_slowest_of_more_devices_is_slower() -> None:
    values = [slowest(count) for count in (1, 2, 8, 64, 1024)]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert values == sorted(values)
    # The maximum of two standard normals is 1 / sqrt(pi) on average.
    assert values[1] == pytest.approx(0.564, abs=0.03)


def test_sums_of_tensor_parallelism_that_overlap_are_shorter() -> None:
    plan = replace(PLAN, layout=Layout(tensor=8), recompute="full")
    apart = estimate_step(MODEL, plan, A100).parts["tensor"]
    overlapped = replace(plan, tensor_overlap=True)
    assert 0 < estimate_step(MODEL, overlapped, A100).parts["tensor"] < apart
