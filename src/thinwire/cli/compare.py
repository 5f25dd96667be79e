"""`thinwire compare`: the same task under several methods."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.app import app
from thinwire.cli.options import Asked, Methods, Out, Port, Resume, with_settings
from thinwire.cli.talk import Json, leads, loading, told, typed
from thinwire.cli.train import starting
from thinwire.lab import LabError

Target = Annotated[
    str | None,
    typer.Option(help="time each method to this value of the metric; near plain DDP's last value if not given"),
]
PageIn = Annotated[
    Path | None, typer.Option(help="also write the results to this small file, from which pages are made")
]


@app.command(
    epilog="Examples:\n\nthinwire compare\n\nthinwire compare --task stdlib --size 10M --workers 4 --link 100mbit\n\n"
    "thinwire compare --link 10mbit --method DDP --method 'ErrorFeedback(TopK(0.01))' --target 0.95"
)
@with_settings("method")
def compare(
    asked: Asked,
    method: Methods = None,
    target: Target = None,
    out: Out = None,
    resume: Resume = False,
    port: Port = None,
    page_in: PageIn = None,
    json: Json = False,
) -> None:
    """Train the same task with several methods, one after another: a table, summary.json and report.html."""
    goal = _target(target)
    loading()
    from rich.markup import escape

    from thinwire.lab.pages import show
    from thinwire.lab.pages.report import write_report
    from thinwire.lab.run.settings import choose_link, out_folder, settle
    from thinwire.lab.studies.compare import DEFAULT, check_resumable, conclude, prepare, run_all

    if resume:
        check_resumable(out)
    link, emulated = choose_link(asked["link"], asked["rtt"], asked["workers"], told.note)
    methods, folder, folders = method or list(DEFAULT), Path(), []
    if leads():
        template = settle({**asked, "method": methods[0]})
        folder = out_folder(out, "compare", template.task)
        folders = prepare(folder, template, methods, resume)
        told.place, told.folders = folder, folders
    links: Any = link if emulated else None
    starting(asked["workers"], links)
    with show.progress(told.notes, told.note, len(folders)) as on_step:
        failed = run_all(folders, asked["workers"], links=links, resume=resume, port=port, on_step=on_step)
    if not leads():
        return
    summary = conclude(folder, folders, failed, link=link, emulated=emulated, target=goal)
    write_report([f for f in folders if f not in failed], folder / "report.html", summary["winner"], summary)
    if page_in is not None:
        from thinwire.lab.papers import comparisons

        comparisons.write(
            comparisons.keep(typed(sys.argv[1:]), summary, [f for f in folders if f not in failed]), page_in
        )
        told.note(f"Kept for the documents: {page_in}. python docs/make_studies.py makes their tables and figures.")
    for name, said in summary["failed"].items():
        told.error(f"{name}: {said}")
    table = None if json else show.comparison(summary)
    lines = [] if method else [f"{escape(name)}: {what}" for name, what in DEFAULT.items()]
    told.answer(summary, table, *lines, f"Report: {folder / 'report.html'}", f"[bold]{summary['winner']}", as_json=json)


def _target(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError as error:
        raise LabError(f"--target is a number, 0.95 for an accuracy or 1.7 for a loss, not {text}") from error
