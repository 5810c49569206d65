"""One action of a rank of a pipeline."""

from __future__ import annotations

from typing import NamedTuple


class PipelineAction(NamedTuple):
    """One action: "F" forward, "B" backward, "I" backward for inputs, "W" backward for weights."""

    kind: str
    stage: int
    micro: int
