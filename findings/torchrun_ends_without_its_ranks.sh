#!/bin/sh
# torch 2.13.0: torchrun handles SIGTERM, SIGINT, SIGHUP and SIGQUIT, and forwards them. SIGUSR1, which
# Slurm's `--signal=USR1@300` sends before the time limit, ends torchrun itself by signal 10: the ranks
# are not told, and run on without an agent, so that nothing restarts them or ends them after a failure.
# With `--signals-to-handle SIGUSR1,SIGTERM` the ranks get SIGUSR1.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/rank.py" <<'PYTHON'
import os
import pathlib
import signal
import sys
import time

place = pathlib.Path(sys.argv[1])
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append("SIGUSR1"))
(place / "ready").write_text(str(os.getpid()))
while not (place / "end").exists():
    time.sleep(0.05)
    said = place / "new"
    said.write_text(" ".join(heard) or "nothing")
    said.replace(place / "said")
PYTHON
start() {
    rm -f "$directory/ready" "$directory/end" "$directory/said"
    "$directory/venv/bin/torchrun" "$@" "$directory/rank.py" "$directory" > /dev/null 2>&1 &
    agent=$!
    until [ -s "$directory/ready" ]; do sleep 0.1; done
    rank=$(cat "$directory/ready")
    sleep 3 # in the agent's loop
    kill -USR1 "$agent"
}
start --nproc-per-node=1
code=0
wait "$agent" 2> /dev/null || code=$?
sleep 5
alive=no
! kill -0 "$rank" 2> /dev/null || alive=yes
seen="torchrun ended with $code; the rank is alive: $alive, and received $(cat "$directory/said")"
touch "$directory/end"
start --nproc-per-node=1 --signals-to-handle=SIGUSR1,SIGTERM
for _ in $(seq 300); do
    ! grep -q SIGUSR1 "$directory/said" || break
    sleep 0.1
done
seen="$seen; with the option it received $(cat "$directory/said")"
touch "$directory/end"
wait "$agent" 2> /dev/null || true
echo "$seen"
expected="torchrun ended with 138; the rank is alive: yes, and received nothing"
[ "$seen" = "$expected; with the option it received SIGUSR1" ]
