"""`thinwire study`: grids of runs."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.app import app
from thinwire.cli.options import Asked, Methods, Out, with_settings
from thinwire.cli.talk import Json, loading, numbers, told, typed
from thinwire.lab import LabError

STUDIES = ("sparse", "exdyna", "variance", "rank", "frontier", "sites")


@app.command(
    epilog="Examples:\n\nthinwire study sparse --quick\n\nthinwire study sites --size 0.8M\n\n"
    "thinwire study exdyna --task cifar10 --model resnet8\n\n"
    "thinwire study frontier --task stdlib --workers 4 --rehearse --seeds 3 "
    "--method 'LocalSteps(Dense(), every=50)'\n\n"
    "thinwire study exdyna --rehearse --only density=0.01 --only seed=0 --page\n\n"
    "thinwire study frontier --task stdlib --rehearse --steps 4000 --screen 400,1000 --keep 0.5 --rates 1,2,4 "
    "--optimizers adamw,muon --muon-rates 0.5,1,2 --method 'Dense()' --method 'ErrorFeedback(PowerSGD(4))'"
)
@with_settings("method", "seed", "grain", "overlap", "checkpoint_every", "rtt")
def study(
    asked: Asked,
    name: Annotated[str, typer.Argument(help=f"{', '.join(STUDIES)}")],
    quick: Annotated[bool, typer.Option("--quick", help="a small grid, in minutes")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="run workers as threads, faster: same quality and bytes, no times")
    ] = False,
    method: Methods = None,
    rates: Annotated[str, typer.Option(help="with --method: learning rates to try, as factors: 1,0.3,3")] = "1",
    muon_rates: Annotated[str, typer.Option(help="with --method: the same for --muon-lr")] = "1",
    optimizers: Annotated[str | None, typer.Option(help="with --method: optimizers to try: sgd,adamw,muon")] = None,
    seeds: Annotated[int, typer.Option(help="with --method: how many seeds")] = 1,
    screen: Annotated[
        str | None, typer.Option(help="first try all with fewer steps, and continue the best: 400,1000")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="run a part of the grid: density=0.01, or seed=0,1; can be repeated"),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="also write the results to a small file, from which pages are made")
    ] = False,
    page_in: Annotated[Path, typer.Option(help="with --page: the folder, or the file itself")] = Path("docs/studies"),
    keep: Annotated[float, typer.Option(help="with --screen: the share of the runs that is continued")] = 0.5,
    out: Out = None,
    json: Json = False,
) -> None:
    """Run a paper's experiment as a grid of runs. The same command again runs only what is missing."""
    if name not in STUDIES:
        raise LabError(f"there is no study {name!r}: take {', '.join(STUDIES)}")
    if method and name != "frontier":
        raise LabError(f"the study {name} has methods of its own: --method goes with frontier")
    if rehearse and asked["link"]:
        raise LabError("a rehearsal has no link, since its workers are threads: leave out one of the two")
    if name == "sites" and asked["link"]:
        raise LabError("the study sites goes through links of its own: leave out --link")
    if not 0 < keep < 1:
        raise LabError(f"--keep is a share above 0 and below 1, not {keep:g}")
    if seeds < 1:
        raise LabError(f"--seeds must be above 0, not {seeds}")
    stages = _stages(screen, asked["steps"])
    factors, muon_factors = (numbers(t, o, "1,0.3,3") for t, o in ((rates, "--rates"), (muon_rates, "--muon-rates")))
    chosen_optimizers = _optimizers(optimizers)
    loading()
    if name == "sites":
        return _sites(asked, out, json)
    from thinwire.lab.pages import show
    from thinwire.lab.run.settings import choose_link, out_folder, settle
    from thinwire.lab.studies import grids, kept, studies
    from thinwire.lab.studies import screen as screening
    from thinwire.lab.studies import study as grid

    chosen = studies.STUDIES[name]
    link, emulated = choose_link(asked["link"], None, asked["workers"], told.note)
    base = settle({**asked, "steps": 150 if quick and not asked["steps"] else asked["steps"]})
    if method:
        cells = grids.asked_cells(base, method, factors, range(seeds), muon_factors, chosen_optimizers)
    else:
        cells = chosen.cells(base, quick)
    cells = grids.cut(cells, only or [])
    folder = out_folder(out or Path("runs", f"study-{name}-{base.task}{'-quick' if quick else ''}"), "study", base.task)
    told.note(f"{len(cells)} cells: {chosen.about}. Those that {folder} holds already are kept.")

    def make(some: Any, where: Path) -> dict[Path, str]:
        told.place, told.folders = folder, [where / cell.name for cell in some]
        with show.progress(told.notes, told.note, len(some)) as on_step:
            if rehearse:
                return grid.rehearse_study(some, where, os.cpu_count() or 1, on_step)
            return grid.run_study(some, where, link if emulated else None, on_step)

    if stages:
        before = len(cells)
        cells = screening.screened(cells, folder, stages, keep, make)
        told.note(f"{len(cells)} of {before} cells go on to {base.steps} steps: {folder / 'screen.json'} says which")
    failed = make(cells, folder)
    found, said = grid.conclude(chosen, cells, folder, failed)
    for text, count in counted(failed.values()).items():
        told.error(f"{text} ({count} cells)" if count > 1 else text)
    if page:
        place = kept.write(kept.keep(name, chosen.about, typed(sys.argv[1:]), found, said, failed), page_in)
        told.note(f"Kept for the documents: {place}. python docs/make_studies.py makes their tables and figures.")
    table = None if json else show.rows(grid.table_head(found), grid.table_rows(found))
    told.answer(grid.read_conclusion(folder), table, *said, f"Report: {folder / 'report.html'}", as_json=json)


def _sites(asked: dict[str, Any], out: Path | None, json: bool) -> None:
    """Predictions for a grid of links: no runs, no link, no rights."""
    from json import dumps

    import torch

    from thinwire import plan
    from thinwire.lab.pages import show
    from thinwire.lab.records.files import write_text
    from thinwire.lab.studies import sites
    from thinwire.lab.tasks import load_task
    from thinwire.lab.tasks.data import default_folder

    torch.set_num_threads(1)
    model = load_task(asked["task"], asked["model"], default_folder()).model()
    folder = out or Path("runs", "study-sites")
    folder.mkdir(parents=True, exist_ok=True)
    with show.waiting(told.notes, "links", len(sites.RATES) * len(sites.TRIPS)) as advance:
        name = "/".join(filter(None, (asked["task"], asked["model"])))
        found = sites.predicted(plan.layout_of(model), name, [asked["workers"]], advance)
    write_text(folder / "sites.json", dumps(found, indent=1) + "\n")
    write_text(folder / "sites.md", sites.table(found))
    sites.picture(found).write(folder / "sites.svg")
    told.answer(found, sites.table(found), f"Picture: {folder / 'sites.svg'}", as_json=json)


def counted(texts: Any) -> dict[str, int]:
    """Each text once, with how often it was said."""
    said: dict[str, int] = {}
    for text in texts:
        said[text] = said.get(text, 0) + 1
    return said


def _stages(text: str | None, steps: int | None) -> list[int]:
    if text is None:
        return []
    found = [int(number) for number in numbers(text, "--screen", "400,1000")]
    if found != sorted(set(found)) or (steps is not None and found[-1] >= steps):
        raise LabError(f"--screen are growing numbers of steps, below --steps, not {text}")
    return found


def _optimizers(text: str | None) -> list[str]:
    from thinwire.lab.records.run import OPTIMIZERS

    found = [] if text is None else [part.strip() for part in text.split(",")]
    for one in found:
        if one not in OPTIMIZERS:
            raise LabError(f"--optimizers are {', '.join(OPTIMIZERS)}, with commas between them, not {one}")
    return found
