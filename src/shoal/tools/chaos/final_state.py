"""The final state of a run: the latest complete checkpoint of each run directory below a directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from shoal.checkpoint import Files
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.store import DamageError, Manifest, damage, manifest_of


def latest_checkpoint(checkpoints: Path) -> tuple[Path, Manifest] | None:
    """Return the latest complete checkpoint of a directory with its manifest; None without one."""
    for path in store_in(checkpoints, Files()).candidates():
        try:
            manifest = manifest_of(path)
        except DamageError:
            continue
        if isinstance(path, Path) and damage(path, manifest) is None:
            return path, manifest
    return None


def checkpoint_directories(home: Path) -> list[Path]:
    """Return the directories of checkpoints below a directory."""
    return sorted({path.parents[1] for path in home.rglob("step-*/manifest.json")})


def digest_end(home: Path) -> str:
    """Return the SHA-256 of all tensors of the final checkpoints, by the hashes in their manifests."""
    found = []
    for directory in checkpoint_directories(home):
        latest = latest_checkpoint(directory)
        if latest is None:
            continue
        _, manifest = latest
        files = {name: each.sha256 for name, each in manifest.files.items() if name != "state.json"}
        found.append([str(directory.relative_to(home)), manifest.step, sorted(files.items())])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if found else ""
