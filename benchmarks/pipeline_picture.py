"""The picture of a pipeline schedule in the documentation: 1F1B on four ranks, eight micro-batches.

It shows a plan, not a measurement: in `Timetable` a backward pass takes as long as two forward passes.

    python benchmarks/pipeline_picture.py [--picture docs/pictures/pipeline_1f1b.svg]
"""

from __future__ import annotations

from pathlib import Path

import shoal
from harness import INK, parse

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "pipeline_1f1b.svg"


def draw(path: Path) -> None:
    """Draw the schedule as an SVG."""
    pipeline = shoal.Pipeline(split_points=("blocks.2", "blocks.4", "blocks.6"), schedule="1f1b")
    pipeline.timetable(ranks=4, micro_batches=8).draw(path)
    # On a page it is scaled down, and the site's dark theme may differ from the system's.
    picture = path.read_text(encoding="utf-8").replace("font:11px", "font:15px")
    path.write_text(picture.replace("#333", INK).replace("#ccc", INK), encoding="utf-8")


def main() -> None:
    draw(parse(__doc__, picture=PICTURE).picture)


if __name__ == "__main__":
    main()
