"""`shoal report` and `shoal last-exit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import show_document

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
    prometheus: Annotated[
        bool,
        typer.Option("--prometheus", help="Print metrics in Prometheus's text format; write no files."),
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
    from shoal.tools.report.html import save_page
    from shoal.tools.report.run_page.document import run_document
    from shoal.util.tables import plain_console, print_line, print_path

    if prometheus:
        from shoal.tools.report.prometheus import prometheus_text

        typer.echo(prometheus_text(run))
        return
    if trace is not None:
        from shoal.tools.report.timeline import make_timeline

        print_path(plain_console(), make_timeline(run, trace))
        return
    history = read_history(run)
    verdict = find_bottleneck(history)
    found = run_document(history, verdict)
    if text or as_json:
        show_document(found, as_json=as_json)
        return
    folder = history.directory / "report" if out is None else Path(out)
    path = save_page(found, folder / PAGE, option="-o DIR")[0]
    print_line(plain_console(), verdict.sentence)
    print_path(plain_console(), str(path))


def last_exit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    newer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            metavar="FILE",
            help="Ignore records that are not newer than FILE, such as those of an earlier attempt.",
        ),
    ] = None,
) -> None:
    """Print how a run ended, and exit with its code.

    The code is 0 if all ranks of the last attempt finished, 75 if all saved after a signal,
    130 after Ctrl-C, and 1 otherwise, including without a record. Use it in place of
    mpiexec's own exit code.
    """
    from shoal.tools.report.last_exit import last_exit as read

    found = read(run, newer=newer)
    typer.echo(f"{run}: {found.text}")
    raise typer.Exit(found.code)
