"""Predicted and measured step times of layouts: on 1, 2 and 4 processes, and over a narrow network.

    python benchmarks/plan_processes.py                          # both
    python benchmarks/plan_processes.py --what network --nodes 8 --rates 1gbit 200mbit
    python benchmarks/plan_processes.py --what processes --launches 1 --steps 40     # about 7 minutes
    python benchmarks/plan_processes.py --what processes --numbers 4 --ranks 4

*processes* measures this machine with `shoal bench comm` and `shoal bench machine --model`, with one
thread per process, and trains a transformer. As many processes run `shoal bench machine` at once as
train, up to one for each core, because cores share caches and memory. The machine must be idle. A
virtual machine may still be 1.5 times slower for some seconds, so each layout is launched several
times, and a large product is computed before and after each step. The seconds of a step are divided
by the time of these products, relative to that at which the machine was measured. The C library keeps
freed memory: otherwise, the kernel clears it again in some steps. A loop of the lowest priority runs
on each core. Without it, a core of a virtual machine stops when a rank waits for another one, and it
may take 1 ms until it runs again.

*network* starts a Slurm cluster on this machine (see cluster.py): a network namespace and a link for
each node. It measures the ranks, all at once, with `shoal bench comm` and `shoal bench machine` at
each rate. Almost all of the computation is a sleep of known duration, so that the ranks do not
disturb each other and the network is tested. The layouts are ranked by both times. LocalSGD, which is
another training, is not among them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

import cluster
import shoal
from harness import finish, parse, show
from helpers.planned_models import Transformer, values, words
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.time.simulation import mean_time, run_ranks
from shoal.tools.plan.trace import planned_strategies, trace_step
from shoal.tools.plan.work.planned_step import PlannedStep

WIDTH, HIDDEN, BLOCKS, BATCH = 256, 2048, 8, 32
FORWARD = 0.02
"""Seconds that a block sleeps in its forward pass with a batch of BATCH on 8 ranks; backward twice."""
EACH = FORWARD / (BATCH // 8 * HIDDEN)
"""The same, of one element."""
MICRO_BATCHES = 8
"""Of a pipeline."""
SPLIT_POINTS = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}
"""Where the stages of a pipeline of transformer blocks begin."""
AVERAGING = 4
"""Steps between two averages of LocalSGD."""
WARM = 4
PROBE = 1024
"""Rows and columns of the product that measures the speed of the machine before and after each step."""
OPTIMIZER = partial(torch.optim.SGD, lr=1e-4)
"""It reads and writes little, so that ranks that share cores disturb each other less."""
SHOAL = str(Path(sys.executable).with_name("shoal"))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_MMAP_THRESHOLD_": str(10**11)}
COMM = (
    *("--operations", "all_reduce,all_gather,reduce_scatter"),
    *("--sizes", "4KiB,256KiB,32MiB"),
)


class Rate:
    """FLOP/s of the machine on which a delay is predicted."""

    value = 1.0


@torch.library.custom_op("shoal_benchmarks::delay", mutates_args=())
def delay(x: Tensor, each: float) -> Tensor:
    """Sleep for `each` seconds per element, and return a copy."""
    time.sleep(each * x.numel())
    return x.clone()


@delay.register_fake
def _(x: Tensor, each: float) -> Tensor:
    return torch.empty_like(x)


delay.register_autograd(
    lambda ctx, gradient: (delay(gradient, 2 * ctx.each), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "each", inputs[1]),
)


@register_flop_formula(torch.ops.shoal_benchmarks.delay)
def _flops(shape: Sequence[int], each: float, **_: object) -> float:
    """Return the FLOPs that take the time of a delay on the machine of the prediction."""
    return each * torch.Size(shape).numel() * Rate.value


class Block(nn.Module):
    """An MLP with a skip connection, whose hidden layer takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(delay(self.up(x), EACH))
        return y


class Sleeping(nn.Module):
    """Blocks that sleep, whose parameters have 34 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sleeping() -> Workload:
    rows = torch.randn(16 * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    return Workload(Sleeping, shoal.Task(values), (rows, rows))


def computing() -> Workload:
    rows = torch.randint(0, 2000, (16 * BATCH, 65), generator=torch.Generator().manual_seed(0))
    return Workload(Transformer, shoal.Task(words), (rows[:, :-1], rows[:, 1:]))


MODELS: dict[str, Callable[[], Workload]] = {"sleeping": sleeping, "computing": computing}


def layouts(size: int) -> tuple[str, ...]:
    """Return the layouts of `size` ranks that are compared."""
    sharded = [f"shard={size}"] if size > 1 else []
    mixed = [f"replicate=2,shard={size // 2}"] if size >= 4 else []
    pipeline = [f"pipeline={size}"] if size in SPLIT_POINTS else []
    return (f"replicate={size}", *sharded, *mixed, *pipeline)


def plan_of(layout: str, size: int) -> PlannedStep:
    """Return the plan of a layout; LocalSGD trains as many replicas as there are ranks."""
    degrees = Layout.parse(f"replicate={size}" if layout == "LocalSGD" else layout).resolve(size)
    local = BATCH // degrees.data_size
    micro = local // MICRO_BATCHES if degrees.pipeline > 1 else local
    return PlannedStep(
        layout=degrees,
        global_batch=BATCH,
        micro_batch=micro,
        precision="fp32",
        split_points=SPLIT_POINTS.get(degrees.pipeline, ()),
    )


def predicted_seconds(model: str, layout: str, size: int, machine: Machine) -> float:
    """Return the predicted seconds of a step, on average over the steps between two averages."""
    Rate.value = machine.fp32 * machine.efficiency.product
    plan = plan_of(layout, size)
    if layout != "LocalSGD":
        ranks = [
            trace_step(MODELS[model], plan, rank=rank, devices=machine.devices, optimizer=OPTIMIZER)
            for rank in plan.layout.group(0, "pipeline")
        ]
        segments = [each.segments for each in ranks]
        return float(max(each.time.total for each in run_ranks(segments, plan, machine)))
    strategy = shoal.LocalSGD(sync_every=AVERAGING)
    steps = [
        trace_step(
            lambda: MODELS[model]()._replace(strategy=strategy),
            plan,
            averaging=averaging,
            optimizer=OPTIMIZER,
        )
        for averaging in (True, False)
    ]
    one, others = (run_ranks([each.segments], plan, machine)[0].time for each in steps)
    return float(mean_time(one, others, AVERAGING).total)


def run_rank(model: str, layout: str, steps: int, results: Path) -> None:
    """Train on this rank; rank 0 writes the seconds of each step, and of the probes around it."""
    built, every = MODELS[model](), AVERAGING if layout == "LocalSGD" else 1
    assert not isinstance(built.model, nn.Module)
    with shoal.init(layout="replicate=-1" if layout == "LocalSGD" else layout, device="cpu") as world:
        averaging = [shoal.LocalSGD(sync_every=every)]
        plan = plan_of(layout, world.size)
        strategies = averaging if every > 1 else planned_strategies(plan)
        module = shoal.parallelize(built.model(), world, strategies)
        step = shoal.Step(module, OPTIMIZER(module.parameters()), built.task, clip=1.0)
        loader = shoal.Loader(built.dataset, world, batch_size=BATCH, micro_batches=plan.micro_batches)
        times: list[tuple[float, float]] = []
        probes = [probe(world)] if model == "computing" else []
        batches = loader.epochs(100)
        for _ in range(WARM + steps):
            begun = time.perf_counter()
            step(next(batches))
            seconds = time.perf_counter() - begun
            probes += [probe(world)] if probes else []
            times.append((seconds, statistics.fmean(probes[-2:]) if probes else 0.0))
        cluster.write_results(world, results, times[WARM:])


def probe(world: shoal.World) -> float:
    """Compute a large product on one rank per core, and return the seconds of the slowest."""
    ones, cores = torch.ones(PROBE, PROBE), sorted(os.sched_getaffinity(0))
    world.barrier()
    mine = torch.zeros(())
    if world.rank < len(cores):
        # Otherwise, the kernel may run two of these ranks on one core.
        os.sched_setaffinity(0, cores if len(cores) == 1 else {cores[world.rank]})
        begun = time.perf_counter()
        ones @ ones
        mine += time.perf_counter() - begun
        os.sched_setaffinity(0, cores)
    world.all_reduce(mine, "max")
    return float(mine)


def compare(
    model: str, size: int, machine: Machine, measure: Callable[[str], float], named: Sequence[str]
) -> list[dict[str, Any]]:
    """Print the predicted and the measured seconds of layouts, and return them."""
    rows: list[dict[str, Any]] = []
    for layout in named:
        predicted, measured = predicted_seconds(model, layout, size, machine), measure(layout)
        row = {"layout": layout, "measured": measured, "predicted": predicted}
        rows.append({**row, "error": f"{predicted / measured - 1:+.1%}"})
    show(f"{size} ranks; seconds per step", rows)
    ranked = [row for row in rows if row["layout"] != "LocalSGD"]
    if len(ranked) > 1:
        best = [min(ranked, key=lambda row: row[key])["layout"] for key in ("predicted", "measured")]
        print(f"  fastest layout: predicted {best[0]}, measured {best[1]}", flush=True)
    return rows


def rank_arguments(model: str, layout: str, steps: int) -> list[str]:
    """Return the arguments with which this script is a rank, without the file of its results."""
    return f"--what rank --model {model} --layout {layout} --steps {steps}".split()


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep all cores from stopping, with a loop on each that leaves the core to any other process."""
    cores = sorted(os.sched_getaffinity(0))
    loop = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "while os.getppid() == int(sys.argv[2]): pass"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", loop, str(core), str(os.getpid())]) for core in cores
    ]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def compare_processes(
    numbers: Sequence[int], ranks: int, steps: int, launches: int, folder: Path
) -> dict[str, Any]:
    """Compare layouts of processes on this machine, each with one thread."""
    variables = os.environ | ONE_THREAD | KEEP_MEMORY
    comm, out, found = folder / "comm.json", folder / "seconds.json", {}

    def run(*command: str, copies: int = 1) -> None:
        started = [
            subprocess.Popen([SHOAL, *command], env=variables, stdout=subprocess.DEVNULL, cwd=path)
            for path in (folder / str(copy) for copy in range(copies))
        ]
        for each in started:
            if each.wait():
                raise subprocess.CalledProcessError(each.returncode, command)

    cores = len(os.sched_getaffinity(0))
    for copy in range(cores):
        (folder / str(copy)).mkdir()
    run("bench", "comm", "-n", str(ranks), *COMM, "--repeats", "101", "-o", str(comm))
    for size in numbers:
        # Cores share caches and memory: as many processes measure at once as will compute.
        run(
            *("bench", "machine", "--comm", str(comm), "--network", "1", "--devices", "4"),
            *("--model", f"{__file__}:computing", "--micro-batch", str(BATCH // size)),
            *("-o", "machine.toml"),
            copies=min(size, cores),
        )
        mine = folder / "0" / "machine.toml"
        print(mine.read_text(), flush=True)
        machine = find_machine(str(mine))
        fastest = 2 * PROBE**3 / machine.fp32

        def measure(layout: str, size: int = size, fastest: float = fastest) -> float:
            arguments = [*rank_arguments("computing", layout, steps), "--results", str(out)]
            times: list[list[float]] = []
            for _ in range(launches):
                run("run", "-n", str(size), __file__, "--", *arguments)
                times += json.loads(out.read_text())
            every = statistics.median(seconds for seconds, _ in times)
            slowdown = statistics.median(around for _, around in times) / fastest
            print(f"  median step {every:.3f} s, on a machine {slowdown:.2f} times slower")
            return statistics.median(seconds * fastest / around for seconds, around in times)

        found[str(size)] = compare("computing", size, machine, measure, layouts(size))
    return found


def compare_network(count: int, rates: Sequence[str], steps: int, folder: Path) -> dict[str, Any]:
    """Compare layouts of one rank per network namespace at each rate."""
    found = {}
    comm, mine = folder / "comm.json", folder / "mine.toml"
    with cluster.started(count) as nodes:

        def run(*arguments: str) -> None:
            cluster.run_ranks(nodes, SHOAL, arguments, variables=ONE_THREAD)

        def measure(layout: str) -> float:
            arguments = rank_arguments("sleeping", layout, steps)
            found, _ = cluster.results_of(nodes, __file__, arguments, variables=ONE_THREAD)
            times = [seconds for seconds, _ in found]
            every = AVERAGING if layout == "LocalSGD" else 1
            groups = (times[first : first + every] for first in range(0, len(times), every))
            return statistics.median(map(statistics.fmean, groups))

        for rate in rates:
            cluster.limit(nodes, rate)
            run("bench", "comm", *COMM, "-o", str(comm))
            run("bench", "machine", "--comm", str(comm), "--link", "1", "-o", str(mine))
            print(mine.read_text(), f"{count} ranks, {rate}", sep="\n", flush=True)
            named = (*layouts(count), "LocalSGD")
            found[rate] = compare("sleeping", count, find_machine(str(mine)), measure, named)
    return found


def main() -> None:
    ways = ("both", "processes", "network", "rank")
    lists = {"numbers": [1, 2, 4], "rates": ["200mbit", "1gbit"]}
    rank = {"model": str, "layout": str, "results": Path}
    given = parse(__doc__, what=ways, **lists, **rank, ranks=2, nodes=8, steps=12, launches=6)
    if given.what == "rank":
        run_rank(given.model, given.layout, given.steps, given.results)
        return
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.what != "network":
            with cores_awake():
                figures["processes"] = compare_processes(
                    given.numbers, given.ranks, given.steps, given.launches, folder
                )
        if given.what != "processes":
            figures["network"] = compare_network(given.nodes, given.rates, given.steps, folder)
    finish(given, figures)


if __name__ == "__main__":
    main()
