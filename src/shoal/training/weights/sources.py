"""Where weights are: a file, a directory with an index, a URL of either, or a name on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.checkpoint.object_store import is_url
from shoal.checkpoint.paths import AnyPath, path_from
from shoal.training.weights.stored import FormatError, StoredTensor, read_header
from shoal.util.errors import CheckpointError
from shoal.util.safe_text import printable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LARGEST_JSON = 256 << 20
"""Bytes of the longest index or configuration that is read."""


class Source:
    """The place of the weights, as the user passed it. Raises CheckpointError with this text."""

    def __init__(self, given: str | os.PathLike[str], *, download: bool, revision: str | None) -> None:
        self._text = os.fspath(given)
        self._download = download
        self._revision = revision
        self.given = f"shoal.load(model, {self._text!r})"
        self.on_hub = (
            isinstance(given, str)
            and not is_url(given)
            and not os.path.lexists(given)
            and _HUB_NAME.fullmatch(given) is not None
            and not given.endswith(".safetensors")
        )
        if revision is not None and not self.on_hub:
            raise self.error(
                "revision is for a name on the Hugging Face hub, and this is a path",
                "leave revision out",
            )

    def error(self, found: str, fix: str) -> CheckpointError:
        """Return an error of this source."""
        return CheckpointError(given=self.given, found=printable(found), fix=fix)

    def locate(self, *, download: bool | None = None) -> AnyPath:
        """Return the file or the directory. Downloads it if it is on the hub and the user allows it."""
        if self.on_hub:
            return self._snapshot(self._download if download is None else download)
        return path_from(self._text)

    def _snapshot(self, download: bool) -> Path:
        try:
            from huggingface_hub import constants, snapshot_download
            from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        except ImportError:
            raise self.error(
                "there is no such path, and huggingface_hub, which finds other names, is not installed",
                "pip install huggingface_hub, or pass the path of a directory",
            ) from None
        patterns = [SINGLE, INDEX, "model-*.safetensors", CONFIG]
        pinned = "" if self._revision is None else f" --revision {self._revision}"
        try:
            found = snapshot_download(
                self._text,
                revision=self._revision,
                local_files_only=not download,
                allow_patterns=patterns,
            )
        except LocalEntryNotFoundError:
            revision = self._revision or "its main revision"
            raise self.error(
                f"there is no such path, and {revision} is not in the local Hugging Face cache, "
                f"{constants.HF_HUB_CACHE}; Shoal is offline unless download=True",
                f"run hf download {self._text}{pinned} where there is a network; or pass download=True",
            ) from None
        except (HfHubHTTPError, OSError, ValueError) as error:
            said = str(error).strip().partition("\n")[0]
            raise self.error(
                f"the Hugging Face hub did not deliver it: {type(error).__name__}: {said}",
                f"check the name and the revision; hf download {self._text}{pinned} says more",
            ) from None
        return Path(found)

    def tensors(self, place: AnyPath) -> dict[str, StoredTensor]:
        """Return the tensors at `place`, by name; reads only the headers of the files.

        Raises CheckpointError for files that are missing, damaged or of different saves.
        """
        with _explained(self):
            if not place.is_dir():
                if not place.exists():
                    raise self.error(
                        "there is no such file or directory",
                        "pass a safetensors file, a directory with model.safetensors or "
                        f"{INDEX}, or a name such as 'org/name' of a model in the Hugging Face cache",
                    )
                self._check_extension(place)
                return read_header(place)
            if (place / SINGLE).is_file():
                return read_header(place / SINGLE)
            if not (place / INDEX).is_file():
                held = ", ".join(sorted(each.name for each in place.iterdir())[:5]) or "nothing"
                raise self.error(
                    f"the directory has neither {SINGLE} nor {INDEX}; it has {held}",
                    "pass a directory that save_pretrained or shoal.export has written; pickled files "
                    "(.bin, .pt) are not read",
                )
            return self._indexed(place)

    def _check_extension(self, place: AnyPath) -> None:
        if not place.name.endswith(".safetensors"):
            raise self.error(
                "it is not a safetensors file, and Shoal does not unpickle files",
                f"if you trust it, use shoal.load(model, torch.load({self._text!r}, "
                "weights_only=True))",
            )

    def _indexed(self, place: AnyPath) -> dict[str, StoredTensor]:
        fix = "download or save the directory again, with all files of one save"
        index = read_json(place / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise self.error(f"{INDEX} has no weight_map", fix)
        files = sorted({name if isinstance(name, str) else repr(name) for name in weight_map.values()})
        odd = [name for name in files if not _is_plain_name(name)]
        if odd:
            raise self.error(
                f"{INDEX} refers to {odd[0]!r}, which is not the name of a safetensors file in this "
                "directory",
                "get the model from a source that you trust",
            )
        absent = [name for name in files if not (place / name).is_file()]
        if absent:
            raise self.error(f"{INDEX} lists {len(files)} files; missing: {', '.join(absent[:3])}", fix)
        found: dict[str, StoredTensor] = {}
        for file in files:
            held = read_header(place / file)
            listed = {name for name, where in weight_map.items() if where == file}
            for names, what in ((listed - held.keys(), "lacks"), (held.keys() - listed, "also has")):
                if names:
                    raise self.error(
                        f"{INDEX} and {file} are of different saves: the file {what} {min(names)}", fix
                    )
            found.update(held)
        return found

    def check_not_quantized(self, place: AnyPath) -> None:
        """Raise CheckpointError if config.json says that the weights are quantized."""
        config = place / CONFIG
        if not place.is_dir() or not config.is_file():
            return
        with _explained(self):
            content = read_json(config)
        quantized = content.get("quantization_config") if isinstance(content, dict) else None
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise self.error(
                f"its weights are quantized ({method or 'see quantization_config in config.json'}), "
                "and Shoal trains unquantized parameters",
                "load a checkpoint of the same model in bfloat16 or float32; or dequantize it once "
                "with transformers and save_pretrained",
            )


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(".") and not {*name} & {*"/\\\0"}


def read_json(path: AnyPath) -> Any:
    """Return the content of a JSON file. Raises FormatError if it is none, or is very large."""
    size = path.stat().st_size if isinstance(path, Path) else path.size()
    if size > _LARGEST_JSON:
        raise FormatError(f"{path} has {size:,} bytes, too many for a file of its name")
    try:
        if isinstance(path, Path):
            return json.loads(path.read_bytes())
        with path.open() as file:
            return json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not a JSON file: {error}") from None


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Raise errors of files as errors of the source."""
    try:
        yield
    except FormatError as error:
        raise source.error(
            str(error), "pass complete safetensors files: download them, or save them again"
        ) from None
    except OSError as error:
        raise source.error(str(error), "check the path and its permissions (ls -l)") from None
