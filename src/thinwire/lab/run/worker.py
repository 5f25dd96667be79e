"""One worker process: joins the others and makes one run after another.

Runs share their processes, because starting some costs more than a short run; each has a process group of its own.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.lab.records.record import Line, Run, write_json
from thinwire.lab.run.loop import this_device, train
from thinwire.lab.run.meeting import LAUNCHER, join_group, meet
from thinwire.lab.tasks import Task, load_task


def work(folders: list[Path], resume: bool, on_step: Callable[[Run, Line], None] = lambda *_: None) -> None:
    """Join the workers that the launcher's environment names, and make the runs kept in rank 0's `folders`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world = meet()
    if rank == 0:
        store.set("thinwire-folders", json.dumps([str(folder) for folder in folders]))
    for folder in map(Path, json.loads(store.get("thinwire-folders"))):
        run = Run.read(folder)
        try:
            apart = dist.PrefixStore(str(folder), store)
            backend = "nccl" if device.type == "cuda" else "gloo"
            join_group(backend, apart, rank, world)
            task = _task(run.task, run.model, Path(run.data))
            train(run, task, folder, resume, lambda line, run=run: on_step(run, line))  # type: ignore[misc]
            dist.barrier()  # nobody leaves while another still reads from it
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            write_json(failure_file(folder, rank), {"time": time.time(), "error": f"{error}", "traceback": said})
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@lru_cache(maxsize=1)
def _task(name: str, model: str | None, data: Path) -> Task:
    return load_task(name, model, data)


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure{rank}.json"


def end_with_launcher() -> None:
    """Leave at once when the process that started the run is no more, however it went."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not os.path.exists("/proc"):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and os.path.exists(f"/proc/{launcher}"):  # it may be gone already
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_launcher()
    order = json.loads(Path(sys.argv[1]).read_text())
    work([Path(folder) for folder in order["folders"]], order["resume"])
    # All is written. A thread of gloo that lets go of a Python object while the interpreter shuts down would abort the
    # process, and a run that has ended would count as one that failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
