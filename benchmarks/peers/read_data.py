"""One rank of data_libraries.py: reads an epoch by the way of a library or by shoal.Loader.

    python benchmarks/peers/read_data.py LIBRARY write FOLDER
    shoal run -n 3 benchmarks/peers/read_data.py LIBRARY WAY FOLDER ATTEMPT

A sample is its number. The global batch is the same on any number of ranks. Attempt
"killed" saves after step SAVE and ends with SIGKILL in step KILL, "whole" reads the epoch, and the
others resume.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shoal

SAMPLES, SHARD, BATCH = 101, 17, 12
"""Six shards: a multiple of 3 and of 2 ranks, as several libraries ask for."""
SAVE, KILL = 4, 6
KILLED, WHOLE = "killed", "whole"
Batches = Iterator[tuple[torch.Tensor, Any]]
"""The numbers of the samples of each local batch, and the state after it."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A format, its own way of reading it on several ranks, and the dataset that shoal.Loader reads."""

    packages: tuple[str, ...]
    write: Callable[[Path], None]
    own: Callable[[Path, Any], Batches]
    ours: Callable[[Path], Any]


def local_batch() -> int:
    return BATCH // dist.get_world_size()


def shards() -> list[range]:
    """Return the samples of each shard."""
    return [range(begin, min(begin + SHARD, SAMPLES)) for begin in range(0, SAMPLES, SHARD)]


def skip_batches(batches: DataLoader[Any], state: Any) -> Batches:
    """Read from the beginning, and drop the batches that this rank has trained on."""
    done = state or 0
    for number, batch in enumerate(islice(iter(batches), done, None), done + 1):
        yield batch, number


def stateful(loader: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Resume by the loader's own state."""
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield batch, loader.state_dict()


# NumPy and torchdata


class Rows(Dataset[Any]):
    """The rows of a memmap."""

    def __init__(self, folder: Path) -> None:
        self.rows = np.load(folder / "rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index])


def write_rows(folder: Path) -> None:
    np.save(folder / "rows.npy", np.arange(SAMPLES))


def sampler_and_skip(folder: Path, state: Any) -> Batches:
    rows = Rows(folder)
    loader = DataLoader(rows, local_batch(), sampler=DistributedSampler(rows, seed=0))
    return skip_batches(loader, state)


def stateful_sampler(folder: Path, state: Any) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rows = Rows(folder)
    sampler = StatefulDistributedSampler(rows, seed=0)
    return stateful(StatefulDataLoader(rows, local_batch(), sampler=sampler), state)


# Parquet and Hugging Face datasets


def write_parquet(folder: Path) -> None:
    """Write a file with a row group for each shard, and a file for each."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"sample": range(SAMPLES)})
    parquet.write_table(table, folder / "all.parquet", row_group_size=SHARD)
    for number, samples in enumerate(shards()):
        parquet.write_table(table.take(list(samples)), folder / f"part-{number}.parquet")


def read_group(path: Path, group: int, start: int = 0) -> list[int]:
    from pyarrow.parquet import ParquetFile

    found: list[int] = ParquetFile(path).read_row_group(group)["sample"].to_pylist()
    return found[start:]


class Groups(IterableDataset[Any]):
    """Every n-th row group, for each of n ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        for group in range(dist.get_rank(), len(shards()), dist.get_world_size()):
            yield from read_group(self.path, group)


def groups_and_skip(folder: Path, state: Any) -> Batches:
    return skip_batches(DataLoader(Groups(folder / "all.parquet"), local_batch()), state)


def sharded_groups(folder: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    path = folder / "all.parquet"
    groups = range(ParquetFile(path).metadata.num_row_groups)
    return shoal.ShardedDataset(groups, lambda group, start: read_group(path, group, start))


def load_parts(folder: Path, *, streaming: bool) -> Any:
    from datasets import load_dataset

    files = sorted(map(str, folder.glob("part-*.parquet")))
    cache = str(folder / "cache")
    return load_dataset(
        "parquet", data_files=files, split="train", streaming=streaming, cache_dir=cache
    )


def split_by_node(dataset: Any, state: Any) -> Batches:
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = split_dataset_by_node(dataset, dist.get_rank(), dist.get_world_size())
    loader = StatefulDataLoader(own, local_batch())
    for batch, after in stateful(loader, state):
        yield batch["sample"], after


def split_map(folder: Path, state: Any) -> Batches:
    return split_by_node(load_parts(folder, streaming=False).shuffle(seed=0), state)


def split_stream(folder: Path, state: Any) -> Batches:
    return split_by_node(load_parts(folder, streaming=True), state)


def split_shuffled(folder: Path, state: Any) -> Batches:
    return split_by_node(load_parts(folder, streaming=True).shuffle(seed=0, buffer_size=10), state)


def sharded_stream(folder: Path) -> Any:
    d = load_parts(folder, streaming=True)
    return shoal.ShardedDataset(
        range(d.num_shards), lambda i, start: d.shard(d.num_shards, i).skip(start)
    )


# WebDataset


def write_tars(folder: Path) -> None:
    import webdataset as wds

    for number, samples in enumerate(shards()):
        with wds.TarWriter(str(folder / f"{number}.tar")) as tar:
            for sample in samples:
                tar.write({"__key__": f"{sample:06}", "cls": sample})


def tars_by_node(folder: Path, state: Any) -> Batches:
    import webdataset as wds

    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = wds.WebDataset(paths, nodesplitter=wds.split_by_node, shardshuffle=False)
    loader = wds.WebLoader(dataset.decode().to_tuple("cls"), batch_size=local_batch())
    for batch, after in skip_batches(loader, state):
        yield batch[0], after


def read_tar(path: str, start: int) -> Iterator[Any]:
    import webdataset as wds

    samples = wds.WebDataset(path, nodesplitter=None, shardshuffle=False)
    return (sample["cls"] for sample in islice(samples.decode(), start, None))


def sharded_tars(folder: Path) -> Any:
    return shoal.ShardedDataset(sorted(map(str, folder.glob("*.tar"))), read_tar)


# MosaicML streaming


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"sample": "int"}, size_limit=400) as writer:
        for sample in range(SAMPLES):
            writer.write({"sample": sample})


def mds_loader(folder: Path, state: Any) -> Batches:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        local=str(folder / "mds"), shuffle=True, shuffle_seed=0, batch_size=local_batch()
    )
    loader = StreamingDataLoader(dataset, batch_size=local_batch())
    for batch, after in stateful(loader, state):
        yield batch["sample"], after


class Whole(Dataset[Any]):
    """All samples of a StreamingDataset by index: its own length is that of one rank's part."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def whole_mds(folder: Path) -> Any:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), batch_size=1)
    return Whole(dataset, dataset.num_samples)


# litdata


def sample_of(index: int) -> dict[str, int]:
    return {"sample": index}


def write_chunks(folder: Path) -> None:
    import litdata

    litdata.optimize(
        sample_of, list(range(SAMPLES)), str(folder / "chunks"), chunk_size=SHARD, num_workers=1
    )


def chunk_loader(folder: Path, state: Any) -> Batches:
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True, seed=0, drop_last=False)
    loader = litdata.StreamingDataLoader(dataset, batch_size=local_batch())
    for batch, after in stateful(loader, state):
        yield batch["sample"], after


def whole_chunks(folder: Path) -> Any:
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"))
    return Whole(dataset, sum(end - begin for begin, end in dataset.region_of_interest))


LIBRARIES = {
    "memmap": Library(packages=("numpy",), write=write_rows, own=sampler_and_skip, ours=Rows),
    "torchdata": Library(packages=("torchdata",), write=write_rows, own=stateful_sampler, ours=Rows),
    "Parquet": Library(
        packages=("pyarrow",), write=write_parquet, own=groups_and_skip, ours=sharded_groups
    ),
    "HF-map": Library(
        packages=("datasets", "torchdata"),
        write=write_parquet,
        own=split_map,
        ours=lambda folder: load_parts(folder, streaming=False),
    ),
    "HF-streaming": Library(
        packages=("datasets", "torchdata"), write=write_parquet, own=split_stream, ours=sharded_stream
    ),
    "HF-shuffled": Library(
        packages=("datasets", "torchdata"), write=write_parquet, own=split_shuffled, ours=sharded_stream
    ),
    "WebDataset": Library(
        packages=("webdataset",), write=write_tars, own=tars_by_node, ours=sharded_tars
    ),
    "MosaicML": Library(
        packages=("mosaicml-streaming",), write=write_mds, own=mds_loader, ours=whole_mds
    ),
    "litdata": Library(packages=("litdata",), write=write_chunks, own=chunk_loader, ours=whole_chunks),
}


def shoal_loader(dataset: Any, state: Any) -> Batches:
    loader = shoal.Loader(dataset, shoal.init(seed=0), batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader.epochs(1):
        for micro in batch:
            yield micro["sample"] if isinstance(micro, dict) else micro, loader.state_dict()


def train(batches: Batches, folder: Path, attempt: str, done: int) -> None:
    """Log the samples of each step; ranks take steps together until none has a batch."""
    rank = dist.get_rank()
    with (folder / f"{attempt}-{rank}.jsonl").open("w", buffering=1) as log:
        for step in count(done + 1):
            found = next(batches, None)
            left = torch.tensor(found is not None, dtype=torch.int64)
            dist.all_reduce(left)
            if not left:
                break
            if found is not None:
                log.write(json.dumps([step, found[0].tolist()]) + "\n")
            if attempt == KILLED and step == SAVE:
                torch.save(found and found[1], folder / f"state-{rank}.pt")
            if attempt == KILLED and step == KILL and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    name, way, place, *rest = sys.argv[1:]
    folder = Path(place)
    if way == "write":
        LIBRARIES[name].write(folder)
        return
    [attempt] = rest
    resumed = attempt not in (KILLED, WHOLE)
    dist.init_process_group("gloo")
    saved = folder / f"state-{dist.get_rank()}.pt"
    state = torch.load(saved, weights_only=True) if resumed else None
    data = LIBRARIES[name]
    batches = (
        data.own(folder.parent, state)
        if way == "own"
        else shoal_loader(data.ours(folder.parent), state)
    )
    train(batches, folder, attempt, SAVE if resumed else 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
