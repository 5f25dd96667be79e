"""`thinwire report`, `methods` and `data`: what there is to read."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.app import app
from thinwire.cli.options import Data
from thinwire.cli.talk import Json, loading, told
from thinwire.lab import LabError
from thinwire.lab.tasks import TASKS


@app.command(epilog="Example:\n\nthinwire report runs/compare-digits-20260101-120000 --out report.html")
def report(
    folders: Annotated[list[Path], typer.Argument(help="what train, compare or study wrote")],
    out: Annotated[Path | None, typer.Option(help="the page; report.html in the first folder if not given")] = None,
    json: Json = False,
) -> None:
    """Write one self-contained page with the curves, times, bytes and settings of runs."""
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}: give the one that train, compare or study wrote")
    loading()
    from thinwire.lab.pages.report import find_runs, read_summary, winner, write_report

    page, runs = out or folders[0] / "report.html", find_runs(folders)
    summary = read_summary(folders[0]) if len(folders) == 1 else None  # a target of one comparison is not another's
    write_report(runs, page, " ".join(filter(None, map(winner, folders))), summary)
    told.answer({"report": str(page), "runs": [str(run) for run in runs]}, f"Report: {page}", as_json=json)


@app.command()
def methods(json: Json = False) -> None:
    """List every method: its paper, what it needs and what it keeps."""
    loading()
    from rich.padding import Padding
    from rich.text import Text

    from thinwire.lab.pages.catalogue import catalogue

    entries = catalogue()
    shown: list[Any] = []
    for entry in entries:
        shown.append(Text(entry.spelling, style="bold"))
        lines = (entry.about, entry.paper, f"Sees {entry.sees}. Keeps {entry.keeps}.")
        shown += [Padding(Text(line), (0, 0, 0, 4)) for line in lines if line]
    told.answer([vars(entry) for entry in entries], *shown, as_json=json)


@app.command(epilog="Examples:\n\nthinwire data\n\nthinwire data cifar10")
def data(
    name: Annotated[str | None, typer.Argument(help="a data set; all are listed if not given")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Fetch a data set, and check it. Without a name: list the tasks and their data."""
    if name is None:
        from rich.table import Table

        table = Table()
        for heading in ("task", "what", "nets", "to fetch"):
            table.add_column(heading)
        for task, entry in TASKS.items():
            table.add_row(task, entry.about, ", ".join(entry.models), entry.fetched)
        told.answer({task: vars(entry) for task, entry in TASKS.items()}, table, as_json=json)
        return
    if name not in (known := [task for task, entry in TASKS.items() if entry.fetched != "nothing"]):
        raise LabError(f"there is nothing to fetch for {name!r}: take {', '.join(known)}")
    from thinwire.lab.tasks.data import default_folder, fetch

    place = fetch(name, data or default_folder())
    told.answer({"name": name, "folder": str(place)}, f"{name}: {place}", as_json=json)
