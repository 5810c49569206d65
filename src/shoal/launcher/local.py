"""N processes on this machine: of a script, which is `shoal run`, or of another job."""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext

from shoal.distributed.env_vars import nodes_of_job, placement, set_variables, worker_threads
from shoal.launcher.entry_point import EntryPoint, Module, Script, find_module, find_script
from shoal.launcher.launcher import Launcher, RunEnd
from shoal.launcher.logs import Logs
from shoal.launcher.nodes import (
    SILENCE,
    WAIT,
    Nodes,
    choose_nodes,
    choose_numbers,
    describe_script,
)
from shoal.launcher.signals import Interrupted, Interrupts
from shoal.util.arguments import check_integer
from shoal.util.errors import LaunchError

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path of the temporary directory, in bytes: Linux cuts the path of a socket at 107."""


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    processes: int,
    module: bool = False,
    restarts: int = 0,
    preemptions: int = 0,
    port: int | None = None,
    grace: float | None = None,
    logs: str | None = None,
    nodes: str | None = None,
    rendezvous: str | None = None,
    wait: float = WAIT,
    silence: float = SILENCE,
) -> int:
    """Run `script` in `processes` processes and return one exit code.

    With `module`, `script` is the name of a module, as after `python -m`.

    The processes find each other by torchrun's variables. When one fails, the others are stopped, and
    the first failure is reported on stderr. All are restarted up to `restarts` times, and up to
    `preemptions` times if they have left with code REQUEUE although the launcher itself received no
    signal. `port` is the port of the rendezvous (default: a free one). `grace` is the number of seconds
    between the signal that ends ranks and SIGKILL (default: SAVING_GRACE if a Run is open, else GRACE);
    after a failure at most GRACE. With `logs`, a directory, the output of rank R is appended to
    `rank-R.log` in it, and only rank 0's output is shown.

    With `nodes`, `"2"` or `"2:4"`, these are the processes of one of several machines, each of which
    makes the same call. They join the rendezvous at `rendezvous` (`HOST:PORT`; default: as the
    scheduler says). A node waits `wait` seconds for others, and has left after `silence` seconds
    without a sign of life. In a job whose environment names its nodes (`JOB_ENVIRONMENTS`), it has the
    defaults of `nodes` and `rendezvous`.

    The exit code is 0, that of the first rank that failed, REQUEUE if ranks left with it, or 128 + n
    for a rank or launcher ended by signal n. Processes that ranks leave running are ended too. Call it
    once per process, in the main thread. Raises LaunchError before any process starts if an argument is
    invalid.
    """
    there = nodes_of_job()
    if there is not None and there.nodes == "1" and nodes is not None:
        there = None  # a job of one node says nothing about the others of this command
    nodes = choose_numbers(nodes, there)
    _check(script, processes=processes, restarts=restarts, preemptions=preemptions, port=port)
    _check_nodes(nodes, rendezvous, port)
    safe_path = sys.flags.safe_path
    job: EntryPoint
    if module:
        file = find_module(script, safe_path=safe_path)
        job = Module(module=script, args=tuple(args), safe_path=safe_path)
    else:
        file = find_script(script)
        job = Script(path=script, args=tuple(args), safe_path=safe_path)
    several = None
    if nodes is not None:
        common = describe_script(
            file, job.name, nodes=nodes, restarts=restarts, preemptions=preemptions
        )
        several = choose_nodes(
            nodes,
            rendezvous,
            placement() if there is None else None,
            common,
            there=there,
            wait=wait,
            silence=silence,
        )
    if there is not None:
        where = f" --nodes {several.text} --rendezvous {several.address}" if several else ""
        print(f"shoal run: {there.reason}:{where} -n {processes}", file=sys.stderr, flush=True)
    files = None
    if logs is not None:
        files = Logs(logs, processes, host=socket.gethostname() if several else "")
    return run_job(
        job,
        processes=processes,
        restarts=restarts,
        preemptions=preemptions,
        port=port,
        grace=grace,
        logs=files,
        nodes=several,
    ).code


def run_job(
    job: EntryPoint,
    *,
    processes: int,
    restarts: int = 0,
    preemptions: int = 0,
    port: int | None = None,
    grace: float | None = None,
    logs: Logs | None = None,
    nodes: Nodes | None = None,
    keep_server: bool = False,
) -> RunEnd:
    """Do for any job what `run` does for a script.

    With `keep_server`, the fork server stays, for the next call.
    """
    check_folder()
    _open_standard_files()
    interrupts = Interrupts()
    launcher = Launcher(
        job,
        processes=processes,
        restarts=restarts,
        preemptions=preemptions,
        port=port or 0,
        grace=grace,
        logs=logs,
        undisturbed=interrupts.held,
        nodes=nodes,
        keep_server=keep_server,
    )
    # OMP_NUM_THREADS must be set when the fork server loads torch.
    variables = set_variables(worker_threads(processes))
    try:
        with interrupts.handled(launcher.forward), variables, logs or nullcontext():
            return launcher.run()
    except Interrupted as interrupted:
        return RunEnd(code=128 + interrupted.signum)


def _open_standard_files() -> None:
    """Open stdin, stdout and stderr that are closed (`>&-`) as /dev/null, for the ranks too.

    Otherwise the next file that is opened would be taken for them.
    """
    file = os.open(os.devnull, os.O_RDWR)
    while file <= 2:
        os.set_inheritable(file, True)
        file = os.open(os.devnull, os.O_RDWR)
    os.close(file)


def _check(script: str, *, processes: int, restarts: int, preemptions: int, port: int | None) -> None:
    check_integer(LaunchError, "shoal run", "-n", processes, 1, fix=f"shoal run -n 1 {script}")
    for name, value in (("restarts", restarts), ("preemptions", preemptions)):
        check_integer(LaunchError, "shoal run", f"--{name}", value)
    if port is not None:
        _check_port(port)


def _check_nodes(nodes: str | None, rendezvous: str | None, port: int | None) -> None:
    if nodes is None and rendezvous is not None:
        raise LaunchError(
            given=f"--rendezvous {rendezvous}",
            found="the number of nodes is missing",
            fix=f"pass --nodes 2 --rendezvous {rendezvous}",
        )
    if nodes is not None and port is not None:
        raise LaunchError(
            given=f"--nodes {nodes}, --port {port}",
            found="--port is for the processes of one machine",
            fix="give the address of the rendezvous: --rendezvous HOST:PORT",
        )


def check_folder() -> None:
    """Raise LaunchError if the path of the temporary directory is too long."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise LaunchError(
            given=f"a temporary directory with a long path, {folder}",
            found=f"{len(os.fsencode(folder))} bytes; the sockets through which processes are started "
            f"allow {LONGEST_FOLDER}",
            fix="TMPDIR=/tmp shoal run …",
        )


def _check_port(port: int) -> None:
    fix = "leave --port out to use a free one, or choose another"
    check_integer(LaunchError, "shoal run", "--port", port, 1, most=65535, fix=fix)
    with socket.socket() as probe:
        # The same option as the store's server, so that ports in TIME_WAIT count as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            found = f"port {port} is in use" if busy else f"port {port}: {error.strerror}"
            raise LaunchError(given=f"--port {port}", found=found, fix=fix) from None
