#!/bin/sh
# MPICH 4.0.3 (wheel of PyPI; Debian 12 has 4.0.2): if both ranks end with exit code 75 after a SIGUSR1
# that mpiexec has forwarded, mpiexec exits with 0 in about one of four runs, and else with 75. MPICH
# 4.1.3 always exits with 75. A script that starts a job again after 75 takes such a run for a finished
# one. SIGTERM has the same effect. One might expect 75, the exit code of all ranks.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
for version in 4.0.3 4.1.3; do
    python3 -m venv "$directory/$version"
    "$directory/$version/bin/pip" install --quiet --no-deps "mpich==$version"
done
cat > "$directory/rank.py" <<'PYTHON'
import os
import pathlib
import signal
import sys
import time

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
(pathlib.Path(sys.argv[1]) / f"ready-{os.environ['PMI_RANK']}").touch()
while True:
    time.sleep(0.02)
PYTHON
codes() {
    for _ in $(seq 60); do
        rm -f "$directory"/ready-*
        "$directory/$1/bin/mpiexec" -n 2 python3 "$directory/rank.py" "$directory" > /dev/null 2>&1 &
        mpiexec=$!
        until [ -e "$directory/ready-0" ] && [ -e "$directory/ready-1" ]; do sleep 0.05; done
        kill -USR1 "$mpiexec"
        code=0
        wait "$mpiexec" || code=$?
        echo "$code"
    done | sort -n | uniq | xargs
}
seen="MPICH 4.0.3: $(codes 4.0.3); 4.1.3: $(codes 4.1.3)"
echo "Exit codes in 60 runs of $seen"
[ "$seen" = "MPICH 4.0.3: 0 75; 4.1.3: 75" ]
