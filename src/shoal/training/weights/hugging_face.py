"""Models of transformers, whose tensors have other names and forms in files than in the module.

transformers renames tensors when it reads and writes files, and stacks those of experts into one. Its
own table of conversions is used here, so that files are the same as those of `save_pretrained`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.modules import copy_with_children
from shoal.training.weights.stored import Form, on_meta


def is_pretrained(model: nn.Module) -> bool:
    """Return whether `model` is one of transformers; does not import it."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def plain_twin(model: nn.Module) -> Any:
    """Return a copy of a model that shares its tensors and has the classes of its author.

    FSDP2 replaces the classes of modules, by whose names transformers finds its conversions.
    """
    twin = copy_with_children(model, plain_twin)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        twin.__class__ = type(model).__mro__[2]
    return twin


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that files of transformers leave out, each with the name of the same tensor."""
    found = getattr(model, "all_tied_weights_keys", None) if is_pretrained(model) else None
    return dict(found or {})


def ignored(model: nn.Module, *, unexpected: bool) -> re.Pattern[str] | None:
    """Return a pattern of names that transformers accepts silently if only one side has them."""
    if not is_pretrained(model):
        return None
    kind = "unexpected" if unexpected else "missing"
    patterns = {*(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())}
    if unexpected:  # buffers that files of earlier versions hold
        patterns |= {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return re.compile("|".join(f"({one})" for one in sorted(patterns))) if patterns else None


@dataclass
class Conversion:
    """Tensors of a file from which transformers makes one or several tensors of the module."""

    converter: Any
    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The names in the file, in their order, by the pattern that they match."""

    def names(self, row: int | None = None) -> list[str]:
        """Return the names in the file, or those from which one row of the result comes."""
        return [n for names in self.sources.values() for n in (names if row is None else [names[row]])]

    def apply(self, tensors: Mapping[str, Tensor], twin: Any) -> dict[str, Tensor]:
        """Return the tensors of the module, from those of the names in `tensors`."""
        made = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                if name in tensors:
                    made.add_tensor(self.target, name, pattern, tensors[name])
        found = made.convert(self.target, model=twin, config=twin.config)
        found = found[0] if isinstance(found, tuple) else found  # transformers 5.0
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}

    @property
    def by_row(self) -> bool:
        """Whether each row of the result comes from one tensor of each pattern, as with experts."""
        operations = self.converter.operations
        steps = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
        return steps[0] == ("MergeModulelist", 0) and all(
            kind == "Concatenate" and dim not in (0, None) for kind, dim in steps[1:]
        )


class FileNames:
    """The conversions of transformers for one model, whose state has the names `here`."""

    def __init__(self, twin: Any, here: Iterable[str]) -> None:
        from transformers import conversion_mapping, core_model_loading

        self._loading = core_model_loading
        self._here = dict.fromkeys(here, True)
        self._prefix = twin.base_model_prefix
        found = conversion_mapping.get_model_conversion_mapping(twin)
        self._renamings = [one for one in found if isinstance(one, core_model_loading.WeightRenaming)]
        self._converters = [one for one in found if isinstance(one, core_model_loading.WeightConverter)]
        self._by_pattern = {key: one for one in self._converters for key in one.source_patterns}

    def translated(self, names: Iterable[str]) -> tuple[dict[str, str], list[Conversion]]:
        """Return the name in the module of each name in a file, and the conversions of the others."""
        plain: dict[str, str] = {}
        converted: dict[str, Conversion] = {}
        for name in sorted(names, key=self._loading.dot_natural_key):
            new, pattern = self._renamed(name, self._renamings, self._converters)
            if new not in self._here and name in self._here:
                new, pattern = self._renamed(name, [], [])
            if pattern is None or new not in self._here:
                plain[name] = new
                continue
            made = converted.setdefault(new, Conversion(self._by_pattern[pattern], new))
            made.sources.setdefault(pattern, []).append(name)
        return plain, list(converted.values())

    def _renamed(self, name: str, renamings: Any, converters: Any) -> tuple[str, str | None]:
        found = self._loading.rename_source_key(name, renamings, converters, self._prefix, self._here)
        new, pattern = found
        return new, pattern


class FileForms:
    """How `save_pretrained` stores the tensors of a model: their names and forms in files."""

    def __init__(self, twin: Any, forms: Mapping[str, Form]) -> None:
        from transformers import conversion_mapping, core_model_loading

        self._twin = twin
        self._revert = core_model_loading.revert_weight_conversion
        if getattr(twin, "_weight_conversions", None) is None:  # computed once, not for each tensor
            odd = getattr(core_model_loading, "PrefixChange", ())
            found = conversion_mapping.get_model_conversion_mapping(twin, add_legacy=False)
            twin._weight_conversions = [one for one in found if not isinstance(one, odd)]
        left_out = {*(twin._keys_to_ignore_on_save or ())}
        left_out |= {name for name, source in tied_names(twin).items() if source in forms}
        self._forms = {name: form for name, form in forms.items() if name not in left_out}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the form of the file."""
        return dict(self._revert(self._twin, dict(tensors)))

    def groups(self) -> list[tuple[list[str], dict[str, Form]]]:
        """Return groups of names that are converted together, each with the resulting forms."""
        alone = {name: self._on_meta([name]) for name in self._forms}
        leader: dict[str, str] = {}  # the first name of the module of each name in the file
        joined: dict[str, list[str]] = {}
        for name, found in alone.items():
            first = next((leader[one] for one in found if one in leader), name)
            joined.setdefault(first, []).append(name)
            leader.update(dict.fromkeys(found, first))
        return [
            (names, alone[names[0]] if len(names) == 1 else self._on_meta(names))
            for names in joined.values()
        ]

    def _on_meta(self, names: Iterable[str]) -> dict[str, Form]:
        empty = {name: on_meta(*self._forms[name]) for name in names}
        return {name: (tuple(one.shape), one.dtype) for name, one in self.stored(empty).items()}


def save_configuration(model: nn.Module, dtype: torch.dtype, folder: Path) -> None:
    """Write config.json, and generation_config.json of models that generate text, into `folder`."""
    twin = plain_twin(model)
    config = copy.deepcopy(twin.config)
    config.architectures = [type(twin).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if twin.can_generate():
        twin.generation_config.save_pretrained(folder)
