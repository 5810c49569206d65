"""`shoal report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.util.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.tools.report import BottleneckReport, History

PAGE = "index.html"


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="DIR", help="Directory of the page (default: RUN/report)."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the report as text; write no files.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; write no files.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Write a timeline of steps A to B of all ranks instead."),
    ] = None,
) -> None:
    """Explain how a run spent its time, as an HTML page.

    It works while the run is active and after a crash. The page needs no network. Its figures are in
    the same directory as PNG, SVG and CSV files.
    """
    from shoal.tools.report import find_bottleneck, read_history
    from shoal.util.tables import plain_console, print_line, print_path

    if trace is not None:
        from shoal.tools.report.trace.request import make_timeline

        print_path(plain_console(), make_timeline(run, trace))
        return
    history = read_history(run)
    verdict = find_bottleneck(history)
    console = plain_console()
    if as_json:
        from shoal.telemetry.events import without_nonfinite
        from shoal.tools.report.summary import summarize_run

        plain = without_nonfinite(
            summarize_run(history, verdict)
        )  # sums of what a file says may have no bounds
        typer.echo(json.dumps(plain, indent=2, allow_nan=False))
    elif text:
        from shoal.tools.report.run_page.text import print_report

        print_report(console, history, verdict)
    else:
        path = _write(history, verdict, out)
        print_line(console, verdict.sentence)
        print_path(console, str(path))


def _write(history: History, verdict: BottleneckReport, out: str | None) -> Path:
    from shoal.tools.report.html import save_page
    from shoal.tools.report.run_page.page import run_page

    folder = history.directory / "report" if out is None else Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before drawing the figures, which is slow
        return save_page(run_page(history, verdict), folder / PAGE)[0]
    except OSError as error:
        raise CheckpointError(
            given=f"a report in {folder}",
            found=str(error),
            fix=f"write to a directory where you have permission: shoal report {history.directory} -o "
            "DIR; or use --text",
        ) from None
