from __future__ import annotations

import torch

from shoal.plan.live_bytes import LiveBytes

KIB = 256
"""Numbers of float32 in 1 KiB."""


def test_storages_are_counted_while_they_live() -> None:
    live = LiveBytes(lambda: "now")
    with live:
        first = torch.ones(4 * KIB)
        view = first[KIB:]
        second = first + 1
        assert live.total == 8 << 10
        del first
        assert live.total == 8 << 10  # the view shares its storage
        del view
        assert live.total == 4 << 10
    assert live.peak == 8 << 10
    assert second.numel() == 4 * KIB


def test_the_storages_of_the_peak_are_kept_with_their_moments() -> None:
    moments = ["first"]
    live = LiveBytes(lambda: moments[-1])
    with live:
        kept = torch.ones(KIB)
        live.restart(3 << 10)
        moments.append("second")
        del kept
        other = torch.ones(3 * KIB)
    assert live.peak == other.nbytes
    assert [each.moment for each in live.at_peak.values()] == ["second"]
    assert live.peak_moment == "second"


def test_resized_storages_count_with_their_new_size() -> None:
    live = LiveBytes(lambda: "now")
    with live, live.following_resizes():
        tensor = torch.ones(KIB)
        tensor.untyped_storage().resize_(0)
        assert live.total == 0
        tensor.untyped_storage().resize_(2 << 10)
        assert live.total == 2 << 10
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_the_gradient_of_a_product_needs_both_operands() -> None:
    live = LiveBytes(lambda: "now")
    with live:
        left, right = (torch.ones(16, 16, requires_grad=True) for _ in range(2))
        product = (left @ right).sum()
        live.restart(0.0)
        product.backward()
    # Two operands, their gradients, the sum, its gradient as one number, and the product's gradient,
    # which is expanded from that number; the product itself is gone.
    assert live.peak == 4 * 1024 + 2 * 4
