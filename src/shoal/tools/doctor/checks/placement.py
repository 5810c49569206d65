"""Check the placement of each rank in the world: its GPU, and its network interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

import torch

from shoal.distributed.interfaces import interfaces
from shoal.distributed.world import World
from shoal.tools.doctor.checks import gpus
from shoal.tools.doctor.findings import CheckResult, RankFacts, describe_ranks, failure, ok, warning
from shoal.util.grouping import group_by


class RankPlacement(TypedDict):
    """A rank in its world. `gpu` identifies its GPU among all; empty on the CPU. Speeds in Mbit/s.

    `unused` is why it computes on the CPU of a machine that has GPUs.
    """

    device: str
    gpu: str
    unused: str
    model: str
    backend: str
    interface: str
    reason: str
    speed: int
    passed_over: list[str]


def describe_placement(world: World) -> RankPlacement:
    """Return the choices of `shoal.init` on this rank."""
    chosen = {choice.what: choice for choice in world.decisions}
    place = RankPlacement(
        device=str(world.device),
        gpu="",
        unused="",
        model="",
        backend=str(chosen["backend"].value),
        interface="",
        reason="",
        speed=0,
        passed_over=[],
    )
    if world.device.type == "cuda":
        found = torch.cuda.get_device_properties(world.device)
        place["gpu"], place["model"] = str(found.uuid), found.name
    elif gpus.has_gpus():
        place["unused"] = chosen["device"].rejected.get("cuda", "")
    if "interface" in chosen:
        way = chosen["interface"]
        own = {one.name: one for one in interfaces()}
        place["interface"], place["reason"] = str(way.value), way.reason
        if way.value in own:
            chosen_one = own[str(way.value)]
            place["speed"] = chosen_one.speed
            place["passed_over"] = [
                f"{name}: {why}"
                for name, why in way.rejected.items()
                if name in own
                and (own[name].infiniband, own[name].speed) > (chosen_one.infiniband, chosen_one.speed)
            ]
    return place


def check_placement(ranks: Sequence[RankFacts[RankPlacement]]) -> Iterator[CheckResult]:
    """Yield GPUs that are shared or missing, and links that are slower than those of other hosts."""
    yield from _judge_devices(ranks)
    if all(one.facts["interface"] for one in ranks):
        yield from _judge_interfaces(ranks)


def _judge_devices(ranks: Sequence[RankFacts[RankPlacement]]) -> Iterator[CheckResult]:
    on_gpus = [one for one in ranks if one.facts["gpu"]]
    without = [one for one in ranks if not one.facts["gpu"]]
    shared = [
        members
        for members in group_by(on_gpus, lambda one: (one.host, one.facts["gpu"])).values()
        if len(members) > 1
    ]
    for members in shared:
        yield failure(
            "GPU",
            f"{describe_ranks(members)} use the same GPU, {members[0].facts['model']}",
            "start one rank for each GPU (srun --gpus-per-task=1, shoal run -n GPUS)",
        )
    if on_gpus and without:
        yield failure(
            "GPU",
            f"{describe_ranks(without)} compute on the CPU, the others on GPUs",
            "request as many GPUs as ranks from the scheduler; run nvidia-smi on these hosts",
        )
    models = group_by(on_gpus, lambda one: one.facts["model"])
    if len(models) > 1:
        text = "; ".join(f"{model} on {describe_ranks(members)}" for model, members in models.items())
        yield warning(
            "GPU", f"{text}: the slowest sets the pace", "request one kind (sbatch --constraint=…)"
        )
    elif on_gpus and not without and not shared:
        yield ok("GPU", f"{next(iter(models))}, one for each rank")
    unused = [one for one in without if one.facts["unused"]]
    if unused and not on_gpus:
        yield failure(
            "GPU",
            f"{describe_ranks(unused)} compute on the CPU, despite GPUs: {unused[0].facts['unused']}",
            "install torch for these GPUs; to use none, export CUDA_VISIBLE_DEVICES=",
        )
    elif not on_gpus:
        yield ok("GPU", "none: every rank computes on the CPU")


def _judge_interfaces(ranks: Sequence[RankFacts[RankPlacement]]) -> Iterator[CheckResult]:
    first = ranks[0].facts
    fastest = max(one.facts["speed"] for one in ranks)
    slower = [one for one in ranks if 0 < one.facts["speed"] < fastest]
    kinds = group_by(slower, lambda one: (one.facts["interface"], one.facts["speed"]))
    for (name, rate), members in kinds.items():
        yield failure(
            "link",
            f"{name} of {describe_ranks(members)} has {rate:,} Mbit/s, others {fastest:,}",
            f"run ethtool {name} on that host; check its cable and the port of the switch",
        )
    for text in dict.fromkeys(text for one in ranks for text in one.facts["passed_over"]):
        yield warning(
            "interface",
            f"{first['interface']}, and not the faster {text}",
            "make the hosts reachable through it, or export GLOO_SOCKET_IFNAME=NAME to choose",
        )
    if not slower:
        speed = f"{fastest:,} Mbit/s" if fastest else "of unknown speed"
        yield ok("link", f"{first['interface']}, {speed}: {first['reason']}")
