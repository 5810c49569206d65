"""A stand-in for kubectl: what Shoal calls of it, on the files of `helpers.cluster.kubernetes`.

Of an object, `NAME.json` is as it was created, `NAME.status` is written by the controller, and
`NAME.delete` asks it to delete the object.
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def main(store: Path, words: list[str]) -> int:
    """Run one command and return its exit code."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word[:2] == "--")
    verb, *plain = (word for word in words if word[:2] != "--")
    space = store / options.get("namespace", "default")
    if verb == "create":
        return _create(store, Path(options["filename"]))
    if verb == "get" and plain == ["jobsets"]:
        return 0
    if verb == "logs":
        for pod in _pods(space, options["selector"]):
            for line in (space / "logs" / pod.stem).read_text(errors="replace").splitlines():
                print(f"[pod/{pod.stem}/train] {line}")
        return 0
    if plain == ["pods"]:
        found = _pods(space, options["selector"])
    else:
        [_, name] = plain
        found = [path for path in [space / f"jobset/{name}.json"] if path.exists()]
    if verb == "delete":
        for path in found:
            path.with_suffix(".delete").write_text("1" if "now" in options else "")
        return 0
    objects = [_read(path) for path in found]
    if plain == ["pods"]:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    elif objects:
        print(json.dumps(*objects))
    return 0


def _create(store: Path, file: Path) -> int:
    made = json.loads(file.read_text())
    data = made["metadata"]
    data.setdefault("namespace", "default")
    data |= {"uid": str(uuid.uuid4()), "creationTimestamp": datetime.now(UTC).isoformat()}
    path = store / data["namespace"] / f"jobset/{data['name']}.json"
    if path.exists():
        print(
            "Error from server (AlreadyExists): error when creating "
            f'"{file}": jobsets.jobset.x-k8s.io "{data["name"]}" already exists',
            file=sys.stderr,
        )
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(made))
    written.rename(path)
    print(json.dumps(made))
    return 0


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    status = path.with_suffix(".status")
    return {**found, **({"status": json.loads(status.read_text())} if status.exists() else {})}


def _pods(space: Path, selector: str) -> list[Path]:
    label, _, name = selector.partition("=")
    assert label == SET_LABEL
    found = sorted((space / "pod").glob("*.json"))
    return [path for path in found if _read(path)["metadata"]["labels"][label] == name]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
