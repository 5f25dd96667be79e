"""`thinwire probe`: what a plan needs to know."""

from typing import Annotated

import typer

from thinwire.cli.app import app
from thinwire.cli.options import Data
from thinwire.cli.talk import Json, loading, told
from thinwire.cli.train import starting
from thinwire.lab import LabError
from thinwire.lab.records.run import check
from thinwire.lab.tasks import check_task


@app.command(
    epilog="Examples:\n\nthinwire probe --workers 4 --link 100mbit --task stdlib\n\ntorchrun ... -m thinwire probe"
)
def probe(
    workers: Annotated[int, typer.Option(help="processes on this machine; under torchrun, as many as it started")] = 2,
    link: Annotated[
        str | None, typer.Option(help="emulate a link: 100mbit, or '20mbit up 100mbit down, 40ms, 0.1% loss'")
    ] = None,
    rtt: Annotated[str | None, typer.Option(help="round-trip time of the emulated link: 1ms, 40ms, ...")] = None,
    task: Annotated[str | None, typer.Option(help="also time a step of this task, without an exchange")] = None,
    model: Annotated[str | None, typer.Option("--model", "--size", help="the task's net")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Measure latency, bandwidth and compute time: the numbers that `thinwire plan` takes."""
    check({"workers": workers, "link": link, "rtt": rtt})
    if task is not None:
        check_task(task, model)
    loading()
    from thinwire.lab.run import probe as prober
    from thinwire.lab.run.settings import choose_link
    from thinwire.lab.tasks.data import default_folder
    from thinwire.plan import spell_rate

    asked, emulated = choose_link(link, rtt, workers, told.note)
    if asked and not emulated:
        raise LabError(
            f"there is no link of {link} to measure here: leave --link out to measure this machine's loopback"
        )
    starting(workers, asked)
    found = prober.probe(workers, asked, task, model, data or default_folder())
    if found is None:
        return  # only the first worker answers
    rate, back = spell_rate(found.rate), f"{1e6 * found.rtt:.0f}us"
    said = [f"{found.workers} workers: each link carries {rate}, a round trip takes {back}"]
    if found.up and found.down and found.ring and found.direct:
        ways = [f"{spell_rate(up, 3)} up {spell_rate(down, 3)} down" for up, down in zip(found.up, found.down)]
        said.append("by worker: " + ", ".join(ways))
        said.append(f"30 kB from each: {1e3 * found.ring:.3g} ms around a ring, {1e3 * found.direct:.3g} ms directly")
    words = ["thinwire plan", f"{task}{f'/{model}' if model else ''}" if task else "my_module:make_model"]
    words += [f"--link {rate}", f"--rtt {back}", f"--workers {found.workers}"]
    if found.compute is not None:
        said.append(f"a step computes {1e3 * found.compute:.0f} ms")
        words.append(f"--compute-ms {1e3 * found.compute:.3g}")
    told.answer({**vars(found), "next": " ".join(words)}, *said, f"[bold]Next: {' '.join(words)}", as_json=json)
