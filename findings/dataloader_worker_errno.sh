#!/bin/sh
# torch 2.13.0 (CPU): an OSError that a dataset raises loses its number on the way out of a worker of a
# DataLoader. With num_workers=0, `except OSError as error` finds error.errno == 5 (EIO) and the file
# name; with num_workers=1 the same handler gets an OSError whose errno and filename are None, since the
# worker sends the class and the text of the traceback. A retry that decides by errno never happens.
# Source: torch/_utils.py, ExceptionWrapper.reraise.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/away.py" <<'PYTHON'
import errno
import os

from torch.utils.data import DataLoader, Dataset


class Away(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "shard-0")


if __name__ == "__main__":
    found = {}
    for workers in (0, 1):
        try:
            next(iter(DataLoader(Away(), num_workers=workers)))
        except OSError as error:
            found[workers] = (error.errno, error.filename)
    print("errno and file name by num_workers:", found)
    assert found == {0: (errno.EIO, "shard-0"), 1: (None, None)}, found
PYTHON
"$directory/venv/bin/python" "$directory/away.py"
# Output seen: errno and file name by num_workers: {0: (5, 'shard-0'), 1: (None, None)}
