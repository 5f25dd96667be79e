"""`thinwire plan`: what methods would cost on a network, without one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.app import app
from thinwire.cli.options import Data, Methods
from thinwire.cli.talk import Json, loading, told
from thinwire.lab import LabError
from thinwire.lab.tasks import check_task

if TYPE_CHECKING:
    from torch import nn

    from thinwire.core.reducer import Reducer
    from thinwire.lab.records.spellings import Method

SCALE = [2**i for i in range(1, 9)]


@app.command(
    epilog="Example:\n\nthinwire plan my_module:make_model --link 1gbit --rtt 1ms --workers 16 --compute-ms 180"
)
def plan(
    model: Annotated[str, typer.Argument(help="my_module:make_model, or a task's name, as stdlib or stdlib/10M")],
    link: Annotated[str, typer.Option(help="the rate of each worker's link")] = "1gbit",
    rtt: Annotated[str, typer.Option(help="round-trip time between workers")] = "0s",
    workers: Annotated[int, typer.Option(help="how many workers, each with a link of its own")] = 8,
    compute_ms: Annotated[
        float, typer.Option(help="time of a step without an exchange; `thinwire probe --task` measures it")
    ] = 0.0,
    rows: Annotated[int, typer.Option(help="for DAD and the like: batch x sequence length of a step")] = 32,
    every: Annotated[
        list[int] | None, typer.Option(help="also plan local steps with an exchange every so many; can be repeated")
    ] = None,
    scale: Annotated[bool, typer.Option("--scale", help="also the time of an exchange for 2 to 256 workers")] = False,
    method: Methods = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Predict step time, bytes and memory of methods on a network, and say whether one of them pays."""
    _check(model, workers, compute_ms, rows, every or [])
    loading()
    import torch

    from thinwire import plan as planner
    from thinwire.core.reducer import Moments
    from thinwire.lab.pages import show
    from thinwire.lab.records.spellings import method_of
    from thinwire.lab.studies.compare import DEFAULT

    torch.set_num_threads(1)
    network = planner.Network(planner.parse_rate(link), workers, planner.parse_seconds(rtt))
    spelled = method or [m for m in DEFAULT if not m.startswith("DDP")]
    wanted = [timed(method_of(one)) for one in spelled]
    layout = planner.layout_of(_model(model, data))
    wanted += [(reducer, steps) for reducer, _ in wanted if reducer.wants is torch.Tensor for steps in every or ()]
    if method is None:  # what depends on how samples differ cannot be told from a model's shape
        wanted = [(reducer, steps) for reducer, steps in wanted if reducer.wants is not Moments]
    costs, safe = [], set()
    with show.waiting(told.notes, "dry runs", len(wanted)) as advance:
        for reducer, steps in wanted:
            if steps:
                costs.append(planner.local_steps(reducer, layout, workers, steps, network.link))
            else:
                costs.append(planner.dry_run(reducer, layout, workers, rows=rows, link=network.link))
            if keeps_the_rest(reducer):
                safe.add(costs[-1].method)
            advance()
    predicted = planner.predict(costs, layout, network, compute_ms / 1e3)
    known = {cost.method for cost in costs}
    advice = planner.recommend(
        [p for p in predicted if p.cost.method in safe or p.cost.method not in known], network, compute_ms / 1e3
    )
    unsafe = sorted(known - safe)
    if unsafe:
        told.note(
            f"Not advised, since they keep nothing of what they do not send, and nobody measured that to be safe: "
            f"{', '.join(unsafe)}."
        )
    scaled: dict[str, list[float]] = {}
    if scale:
        with show.waiting(told.notes, "numbers of workers", len(wanted)) as advance:
            for reducer, steps in wanted:
                if not steps:
                    scaled |= planner.scaling([reducer], layout, network, SCALE, rows)
                advance()
    if not compute_ms:
        told.note(
            "Without --compute-ms nothing can hide behind the backward pass: these are times of the exchange alone."
        )
    where = f"{workers} workers, {link}, {rtt} round trip, {compute_ms:g} ms compute"
    answer: dict[str, Any] = {"model": model, "parameters": layout.numel, "advice": advice, "not_advised": unsafe}
    answer["methods"] = [show.prediction(p) for p in predicted]
    if scaled:
        answer["seconds_by_workers"] = {"workers": SCALE, **scaled}
    shown: list[Any] = [show.predictions(predicted, f"{model}: {layout.numel:,} parameters, {where}")]
    if scaled:
        title = f"ms of the exchange among so many workers, {link}, {rtt} round trip"
        shown.append(show.scaling(scaled, SCALE, title))
    told.answer(answer, *shown, f"[bold]{advice}", as_json=json)


def _check(model: str, workers: int, compute_ms: float, rows: int, every: list[int]) -> None:
    if ":" not in model:
        name, _, size = model.partition("/")
        check_task(name, size or None)
    if workers < 2:
        raise LabError(f"--workers must be 2 or more, not {workers}: one worker has nobody to exchange with")
    if not 0 <= compute_ms < float("inf"):
        raise LabError(f"--compute-ms must be 0 or more, not {compute_ms:g}")
    for name, values in (("--rows", [rows]), ("--every", every)):
        if min(values, default=1) < 1:
            raise LabError(f"{name} must be 1 or more, not {min(values)}")


def _model(spelled: str, data: Path | None) -> "nn.Module":
    from torch import nn

    from thinwire.lab.tasks import load_object, load_task
    from thinwire.lab.tasks.data import default_folder

    if ":" not in spelled:
        name, _, size = spelled.partition("/")
        return load_task(name, size or None, data or default_folder()).model()
    make = load_object(spelled, "model")
    try:
        net = make()
    except Exception as error:  # it is the user's own code, which may raise anything
        raise LabError(
            f"{spelled}() failed ({type(error).__name__}: {error}): write a function that takes no arguments and "
            "returns the model"
        ) from error
    if not isinstance(net, nn.Module):
        raise LabError(f"{spelled} returned a {type(net).__name__}: it must return a torch.nn.Module")
    return net


def timed(method: "Method") -> "tuple[Reducer[Any, Any], int]":
    """A reducer, and the local steps between its exchanges; 0 for gradients."""
    from thinwire.lab.records.spellings import DDP
    from thinwire.wrappers.local_steps import LocalSteps, interval

    if isinstance(method, DDP):
        raise LabError(f"{method!r} needs no --method: plain DDP and bf16 are in every plan")
    if isinstance(method, LocalSteps):
        return method.inner, interval(method.every, 10**9)  # a schedule is planned as it goes on for good
    return method, 0


def keeps_the_rest(reducer: "Reducer[Any, Any]") -> bool:
    """Whether a method sends everything, or keeps what it does not send: what was measured to lose little does."""
    import torch

    from thinwire.core import memory
    from thinwire.core.reducer import Layout
    from thinwire.doors.ddp import averages_everything

    if reducer.wants is not torch.Tensor:
        return not reducer.needs_memory and reducer.conserves
    state = reducer.init(Layout(("weight",), (torch.Size([8, 8]),)))
    return averages_everything(reducer) or bool(memory.entry_tensors(state))
