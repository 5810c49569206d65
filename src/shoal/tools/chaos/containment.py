"""Linux namespaces around a storm: its processes and mounts end with the command, even a killed one.

The command starts `setpriv --pdeathsig` and `unshare --kill-child`. If it dies, the kernel kills the
first process of the PID namespace, and all others with it. All files are in a tmpfs of the mount
namespace, which no other process sees.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.util.errors import LaunchError

SCRATCH = Path("/dev/shm")
"""Exists on every Linux; inside the namespace, a new tmpfs is mounted over it."""
TEMPORARY = SCRATCH / "tmp"
"""The temporary directory of the storm."""
_TRIAL = f"mount -t tmpfs tmpfs {SCRATCH}"
_SECONDS = 30.0
_TRIES = 100
_REMOUNT = 32
"""MS_REMOUNT of mount(2)."""


def contain(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one inside new namespaces.

    Raises LaunchError if this machine does not allow them.
    """
    missing = [name for name in ("setpriv", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        raise LaunchError(
            given="shoal chaos",
            found=f"the programs {', '.join(missing)} of util-linux are missing",
            fix="install util-linux, on Linux",
        )
    said = ""
    # Root may lack the capability in a container, where a user namespace may still be allowed.
    for user in ([], ["--user", "--map-root-user"])[os.geteuid() != 0 :]:
        prefix = _prefix(user)
        done = subprocess.run(
            [*prefix, "sh", "-c", _TRIAL],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return [*prefix, *command]
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given"
    raise LaunchError(
        given="shoal chaos",
        found=f"this machine allows no new PID and mount namespaces ({said}): faults would reach "
        "other processes",
        fix="run it as root, or allow user namespaces: sysctl -w user.max_user_namespaces=1000",
    )


def _prefix(user: Sequence[str]) -> list[str]:
    unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return ["setpriv", "--pdeathsig", "KILL", *unshare, "--propagation", "private"]


class StormDisk:
    """A tmpfs of the mount namespace that can be full or without inodes.

    A disk is full when the mount is limited to the bytes in use, so that no memory is filled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> None:
        """Mount it, empty."""
        self.path.mkdir(parents=True)
        _mount("-t", "tmpfs", "tmpfs", str(self.path))

    def unmount(self) -> None:
        """Remove it with all files."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True, capture_output=True)
        self.path.rmdir()

    def fill(self) -> None:
        """Leave no free bytes."""

        def limit(found: os.statvfs_result) -> str:
            return f"size={max(found.f_blocks - found.f_bfree, 1) * found.f_frsize}"

        self._limit_to_use(limit)

    def fill_inodes(self) -> None:
        """Leave no free inodes."""
        self._limit_to_use(lambda found: f"nr_inodes={found.f_files - found.f_ffree}")

    def restore(self) -> None:
        """End all faults of the disk."""
        self._remount("size=50%,nr_inodes=1m")

    def _limit_to_use(self, limit: Callable[[os.statvfs_result], str]) -> None:
        """Set a limit to what is in use; if ranks write at the same time, it needs another one."""
        tries = _TRIES
        while True:
            tries -= 1
            try:
                return self._remount(limit(os.statvfs(self.path)))
            except OSError:
                if not tries:
                    raise

    def _remount(self, options: str) -> None:
        # Not the program `mount`: while it starts, ranks write more than the new limit.
        path = os.fsencode(self.path)
        if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", path, None, _REMOUNT, options.encode()):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: mount -o remount,{options}", str(self.path))


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
