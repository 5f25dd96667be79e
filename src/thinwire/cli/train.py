"""`thinwire train`: one run."""

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.app import app
from thinwire.cli.options import Asked, Out, Port, Resume, with_settings
from thinwire.cli.talk import Json, leads, loading, told

if TYPE_CHECKING:
    from thinwire.lab.run.links.spelling import Link


@app.command(
    epilog="Examples:\n\nthinwire train --method 'ErrorFeedback(TopK(0.01))'\n\n"
    "thinwire train --task stdlib --size 10M --workers 4 --link 100mbit --method 'ErrorFeedback(ExDyna(0.001))'\n\n"
    "torchrun --nproc-per-node 8 -m thinwire train --task cifar10 --checkpoint-every 100 --out runs/a --resume"
)
@with_settings()
def train(asked: Asked, out: Out = None, resume: Resume = False, port: Port = None, json: Json = False) -> None:
    """Train one task with one method, and record every step."""
    loading()
    from thinwire.lab.pages import show
    from thinwire.lab.records.summary import Records, summarise
    from thinwire.lab.run.launch import launch
    from thinwire.lab.run.settings import choose_link, out_folder, settle
    from thinwire.lab.studies.compare import check_resumable, keep_settings

    if resume:
        check_resumable(out)
    link, emulated = choose_link(asked["link"], asked["rtt"], asked["workers"], told.note)
    folder = Path()
    if leads():
        run = settle(asked)
        folder = out_folder(out, "train", run.task)
        keep_settings(folder, run, resume)
        told.place, told.folders = folder, [folder]
    starting(asked["workers"], link if emulated else None)
    with show.progress(told.notes, told.note) as on_step:
        folders, links = [folder] if leads() else [], link if emulated else None
        launch(folders, asked["workers"], links=links, resume=resume, port=port, on_step=on_step)
    if leads():
        summary = summarise(
            Records.read(folder), None, link.network(asked["workers"]) if link and not emulated else None
        )
        value = "diverged" if summary["diverged"] else show.number(summary["validation"])
        told.answer(
            summary,
            f"{summary['method']}: validation {summary['metric']} {value} after {summary['steps']} steps, "
            f"{1e3 * summary['step_s']:.1f} ms a step{' (predicted)' if summary['predicted'] else ''}, "
            f"{show.size(summary['wire_bytes_a_step'])} a step on each wire. Records: {folder}",
            as_json=json,
        )


def starting(workers: int, links: "Link | None") -> None:
    from thinwire.lab.run.launch import already_launched

    if not already_launched():
        told.note(
            f"starting {workers} worker{'s' if workers > 1 else ''}{' behind emulated links' if links else ''} ..."
        )
