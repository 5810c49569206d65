#!/bin/sh
# litdata 0.2.76: before `torch.distributed.init_process_group`, a StreamingDataset takes the world size
# from WORLD_SIZE, which torchrun sets, but the rank from GLOBAL_RANK, which it does not set. So each of
# two ranks reads the first half, and no rank the second one.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 litdata==0.2.76
cat > "$directory/write.py" <<'PYTHON'
import sys

import litdata


def sample(index):
    return {"sample": index}


if __name__ == "__main__":
    litdata.optimize(sample, list(range(100)), sys.argv[1], chunk_size=10, num_workers=1)
PYTHON
cat > "$directory/rank.py" <<'PYTHON'
import os
import pathlib
import sys

import litdata

dataset = litdata.StreamingDataset(sys.argv[1])
seen = [int(each["sample"]) for each in dataset]
pathlib.Path(sys.argv[2], os.environ["RANK"]).write_text(f"{min(seen)} to {max(seen)}")
PYTHON
"$directory/venv/bin/python" "$directory/write.py" "$directory/chunks" > /dev/null 2>&1
"$directory/venv/bin/torchrun" --nproc-per-node=2 "$directory/rank.py" "$directory/chunks" "$directory" \
    > /dev/null 2>&1
seen="rank 0 read $(cat "$directory/0"), rank 1 $(cat "$directory/1")"
echo "$seen"
[ "$seen" = "rank 0 read 0 to 49, rank 1 0 to 49" ]
