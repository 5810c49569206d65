from __future__ import annotations

import torch

from shoal.tools.plan.memory.live_bytes import LiveBytes, reserved_bytes

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


MIB = 1 << 20


def test_blocks_that_are_all_used() -> None:
    for sizes, segments in (
        ([1], [2]),
        ([MIB], [2]),  # the largest small block
        ([MIB, MIB], [2]),
        ([MIB, MIB, 1], [2, 2]),
        ([512] * 4096, [2]),
        ([513] * 2048, [2]),  # each is rounded to 1,024 bytes
        ([513] * 2049, [2, 2]),
        ([MIB + 1], [20]),  # the smallest large block
        ([9 * MIB, 9 * MIB], [20]),
        ([9 * MIB, 9 * MIB, 2 * MIB], [20]),
        ([9 * MIB, 9 * MIB, 2 * MIB, 2 * MIB], [20, 20]),
        ([10 * MIB], [10]),  # from 10 MiB on, segments have the size of the block
        ([11 * MIB], [12]),
        ([11 * MIB, MIB], [12, 2]),  # small blocks never come from a large segment
        # A rest of 1 MiB is not split off, so that the second block needs a segment.
        ([19 * MIB, MIB + 1], [20, 20]),
        ([], []),
    ):
        assert reserved_bytes(enumerate(sizes)) == sum(segments) * MIB, sizes


def test_a_released_block_is_used_again() -> None:
    changes = [(0, 30 * MIB), (0, 0), (1, 29 * MIB)]
    assert reserved_bytes(changes) == 30 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    # The 12 MiB come from the block of 12 MiB, so that 30 MiB still fit in the other one.
    changes = [(0, 30 * MIB), (1, 12 * MIB), (0, 0), (1, 0), (2, 12 * MIB), (3, 30 * MIB)]
    assert reserved_bytes(changes) == 42 * MIB


def test_free_neighbours_are_joined() -> None:
    parts = [(number, 5 * MIB) for number in range(4)]  # one segment of 20 MiB
    released = [(1, 0), (3, 0), (2, 0)]  # the middle one joins both sides
    assert reserved_bytes([*parts, *released, (4, 9 * MIB)]) == 20 * MIB
    apart = [(0, 0), (2, 0)]
    assert reserved_bytes([*parts, *apart, (4, 9 * MIB)]) == 40 * MIB


def test_free_segments_are_returned_before_more_memory_is_taken() -> None:
    changes = [(0, 20 * MIB), (0, 0), (1, 30 * MIB)]
    assert reserved_bytes(changes) == 30 * MIB
    # The first segment is partly used, so that it stays.
    changes = [(0, 2 * MIB), (1, 9 * MIB), (1, 0), (2, 30 * MIB)]
    assert reserved_bytes(changes) == 50 * MIB


def test_a_segment_that_fits_below_the_peak_returns_none() -> None:
    changes = [(0, 30 * MIB), (1, 20 * MIB), (0, 0), (2, 20 * MIB)]
    # 20 MiB of the 30 MiB are taken; the rest of them serves the next block.
    assert reserved_bytes([*changes, (3, 9 * MIB)]) == 50 * MIB
