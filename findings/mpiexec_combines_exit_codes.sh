#!/bin/sh
# MPICH 5.0.2 and Intel MPI 2021.19 (wheels of PyPI): the exit code of mpiexec is no rank's if two ranks
# end with different ones. MPICH combines them with a bitwise or: 75 and 124 give 127, 75 and 1 give 75,
# and a rank that SIGKILL ends counts as 9. Intel MPI gives 75 for a rank that was killed and one that
# ended with 75. One might expect the first or the largest code, or 137 for SIGKILL: a script that requeues
# a job after 75 (EX_TEMPFAIL, "try again") can't tell a failed rank from ranks that have all saved.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
for package in mpich==5.0.2 impi-rt==2021.19.0; do
    python3 -m venv "$directory/${package%%=*}"
    "$directory/${package%%=*}/bin/pip" install --quiet --no-deps "$package"
done
cat > "$directory/rank.py" <<'PYTHON'
import os
import signal
import sys
import time

code = sys.argv[1 + int(os.environ["PMI_RANK"])]
time.sleep(0.5)  # so that both ranks have been started
if code == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code))
PYTHON
code_of() {
    program=$1
    shift
    code=0
    "$program" -n 2 python3 "$directory/rank.py" "$@" > /dev/null 2>&1 || code=$?
    echo "$code"
}
mpich=$directory/mpich/bin/mpiexec intel=$directory/impi-rt/bin/mpiexec.hydra
seen="MPICH: 75 and 75: $(code_of "$mpich" 75 75), 75 and 1: $(code_of "$mpich" 75 1), \
75 and 124: $(code_of "$mpich" 75 124), SIGKILL and 75: $(code_of "$mpich" SIGKILL 75)
Intel MPI: 75 and 124: $(code_of "$intel" 75 124), SIGKILL and 75: $(code_of "$intel" SIGKILL 75)"
echo "$seen"
expected="MPICH: 75 and 75: 75, 75 and 1: 75, 75 and 124: 127, SIGKILL and 75: 9
Intel MPI: 75 and 124: 75, SIGKILL and 75: 75"
[ "$seen" = "$expected" ]
