"""Processes that start runs: each imports torch and the hooks once, and forks the ranks of its runs.

A server is a launcher that keeps its fork server. All of its runs have the same hash seed, which Python
reads when it starts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe, process
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from shoal.distributed.env_vars import (
    THREADS,
    placement,
    set_variables,
    worker_threads,
    write_variables,
)
from shoal.launcher._cpython import stop_fork_server
from shoal.launcher.entry_point import Script
from shoal.launcher.local import run_job
from shoal.launcher.signals import Interrupted, signal_when_broken
from shoal.launcher.workers import start_server
from shoal.tools.verify.observations import TIMED_OUT, ObserverOptions
from shoal.util.clock import CLOCK
from shoal.util.plain import from_plain
from shoal.util.python import code_command

IMPORTS = ("shoal.tools.verify.metric_hooks",)
"""It imports what optimizers import in their first step, too."""
START = "from shoal.tools.verify.run_servers import serve; serve()"
"""Not `-m`: ranks must find its classes under the module's name, not under `__main__`."""
PAUSE = 0.1
"""Seconds between two looks at a run."""
PATIENCE = 20
"""Half seconds until a server whose ranks do not end is killed."""


@dataclass(frozen=True, kw_only=True)
class ObservedScript(Script):
    """A script that a rank runs under observation.

    `seed` is that of torch's generator at the start, `threads` the number for OMP_NUM_THREADS, None if
    the user has set it.
    """

    observer: ObserverOptions
    reverse_files: bool
    seed: int
    threads: int | None

    def run(self) -> None:
        """Install the hooks and run the script as `__main__`."""
        from shoal.tools.verify.hooks import install_hooks
        from shoal.tools.verify.metric_hooks import observe_metrics
        from shoal.tools.verify.observed_calls import keep_process_groups, reverse_listings

        self._begin_anew()
        keep_process_groups()
        observer = install_hooks(self.observer, placement().rank)
        observe_metrics(observer)
        if self.observer.losses:
            from shoal.tools.verify.loss_hooks import observe_losses

            observe_losses(observer)
        if self.reverse_files:
            reverse_listings()
        super().run()

    def _begin_anew(self) -> None:
        """Replace what this process has in common with those of other runs."""
        import numpy as np
        import torch

        os.chdir(self.observer.root)
        process.ORIGINAL_DIR = self.observer.root  # type: ignore[attr-defined]  # of spawned processes
        # Python itself seeds the generator of `random` in forked processes.
        torch.default_generator.manual_seed(self.seed)
        np.random.seed()
        if self.threads is not None:
            write_variables({THREADS: str(self.threads)})
            torch.set_num_threads(self.threads)


def observed_script(
    path: str, args: tuple[str, ...], observer: ObserverOptions, *, processes: int, reverse_files: bool
) -> ObservedScript:
    """Return a script for this many ranks, with the state of new processes."""
    threads = worker_threads(processes).get(THREADS)
    return ObservedScript(
        path=path,
        args=args,
        observer=observer,
        reverse_files=reverse_files,
        seed=random.SystemRandom().getrandbits(63),
        threads=None if threads is None else int(threads),
    )


def serve() -> None:
    """Run the scripts that the process which started this one asks for, and answer with exit codes.

    The arguments are the file descriptor of the connection, and the largest number of ranks.
    """
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    # Ranks must not hold the pipe that breaks when the command ends.
    pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal_when_broken(pipe, signal.SIGKILL, to=os.getpid())
    signal.signal(signal.SIGINT, lambda *_: None)  # it ends a run, and may come after its end
    with set_variables(worker_threads(int(sys.argv[2]))):
        start_server(IMPORTS)
    try:
        while True:
            order = json.loads(connection.recv_bytes())
            job = from_plain(ObservedScript, order["script"])
            end = run_job(job, processes=order["processes"], keep_server=True)
            connection.send_bytes(json.dumps(end.code).encode())
    except EOFError:
        stop_fork_server()


class TimeLimitError(Exception):
    """The time limit of all runs was reached."""


class RunServer:
    """Start a server for runs on up to `processes` ranks, which imports in the background."""

    def __init__(self, folder: Path, *, hash_seed: int, processes: int) -> None:
        self._output = folder / f"output-{hash_seed}.txt"
        self._connection, theirs = Pipe()
        # `env` sets the seed before Python starts, and leaves this process's environment alone.
        command = ["env", f"PYTHONHASHSEED={hash_seed}"]
        command += code_command(START, str(theirs.fileno()), str(processes))
        with theirs, self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C on the terminal is for the command
            )

    def run(
        self, script: ObservedScript, processes: int, *, limit: float, look: Callable[[], object]
    ) -> int:
        """Run a script and return its exit code, TIMED_OUT after `limit` seconds.

        `look` is called all the time, and may raise to end the run. The output of the run is written to
        `output.txt` among its records.
        """
        begin = self._output.stat().st_size
        until = CLOCK.now() + limit
        try:
            order = {"script": asdict(script), "processes": processes}
            self._connection.send_bytes(json.dumps(order).encode())
            while not self._connection.poll(PAUSE):
                look()
                if CLOCK.now() >= until:
                    self._interrupt()
                    return TIMED_OUT
            code: int = json.loads(self._connection.recv_bytes())
            return code
        except (EOFError, ConnectionError):
            return self._process.wait() or 1  # the reason is in the output
        except BaseException:
            self._interrupt()
            raise
        finally:
            with self._output.open("rb") as output:
                output.seek(begin)
                Path(script.observer.folder, "output.txt").write_bytes(output.read())

    def _interrupt(self) -> None:
        """End the ranks, and read the answer. The launcher kills them at the second signal."""
        answered = False
        try:
            for _ in range(PATIENCE):
                self._process.send_signal(signal.SIGINT)
                if self._connection.poll(0.5):
                    with suppress(EOFError, ConnectionError):
                        self._connection.recv_bytes()
                        answered = True
                    return
        finally:
            if not answered:
                self._process.kill()
                self._process.wait()

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End its process, which has no ranks between two runs."""
        self._connection.close()
        self._process.wait()


class RunServers:
    """The servers of an audit: one for each hash seed, started when it is needed or expected.

    Args:
        folder: An absolute path of a directory for their output.
        processes: The largest number of ranks.
        look: Called ten times per second during a run, with the directory of its records.
        time_limit: Seconds for all runs together.
    """

    def __init__(
        self,
        folder: Path,
        *,
        processes: int,
        look: Callable[[Path], object] = lambda _: None,
        time_limit: float | None = None,
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._look = look
        self._until = None if time_limit is None else CLOCK.now() + time_limit
        self._servers: dict[int, RunServer] = {}
        self.stopped: TimeLimitError | Interrupted | None = None
        """The exception that ended the last run early: no other may start."""

    @property
    def reason(self) -> str:
        """Why runs were ended early: `time limit` or the name of a signal; "" if they were not."""
        if isinstance(self.stopped, Interrupted):
            return signal.Signals(self.stopped.signum).name
        return "" if self.stopped is None else "time limit"

    @property
    def code(self) -> int:
        """The exit code for this reason: TIMED_OUT, 128 + the number of the signal, or 0."""
        if isinstance(self.stopped, Interrupted):
            return 128 + self.stopped.signum
        return 0 if self.stopped is None else TIMED_OUT

    def __enter__(self) -> RunServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.close()

    def expect(self, *hash_seeds: int) -> None:
        """Start the servers for these hash seeds, which import torch at the same time."""
        for seed in hash_seeds:
            if seed not in self._servers or self._servers[seed].ended:
                self._servers[seed] = RunServer(self._folder, hash_seed=seed, processes=self._processes)

    def run(self, script: ObservedScript, processes: int, *, hash_seed: int, limit: float) -> int:
        """Run a script on this many ranks and return its exit code.

        It is TIMED_OUT after `limit` seconds, and if a signal or the time limit of all runs has ended
        the run: `stopped` is this exception then, and raised by the next call.
        """
        if self.stopped is not None:
            raise self.stopped
        self.expect(hash_seed)

        def look() -> None:
            self._look(Path(script.observer.folder))
            if self._until is not None and CLOCK.now() >= self._until:
                raise TimeLimitError

        try:
            return self._servers[hash_seed].run(script, processes, limit=limit, look=look)
        except (TimeLimitError, Interrupted) as stop:
            self.stopped = stop
            return TIMED_OUT
