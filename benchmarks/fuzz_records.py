"""Records of runs: `thinwire report`, and the summaries that are made of the same files, read them or say where."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from fuzz_things import Case, Fuzzer, Wrong, change_of_bytes, changed_bytes, how_many, json_junk

from thinwire.lab import LabError
from thinwire.lab.pages.report import find_runs, render, winner
from thinwire.lab.records.record import Recorder, Run, has_ended, rank_file
from thinwire.lab.records.summary import Records, Target, summarise
from thinwire.plan import Network

FILES = ("run.json", "rank0.jsonl", "rank1.jsonl", "summary.json")
DRAWN = 400  # one case in so many is drawn as a page: that takes longer than all the rest


class RecordsOfRuns(Fuzzer):
    errors = (LabError,)

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.whole, self.here = folder / "whole", folder / "here"
        run = Run(method="ErrorFeedback(TopK(0.01))", workers=2, steps=6, evaluate_every=3)
        self.whole.mkdir()
        run.write(self.whole)
        for rank in range(2):
            recorder = Recorder(rank_file(self.whole, rank))
            recorder.write({"step": 0, "seconds": 0.0, "validation_accuracy": 0.1, "validation_loss": 2.3})
            for step in range(1, run.steps + 1):
                recorder.write(_line(step) | ({"validation_accuracy": 0.1 * step} if step % 3 == 0 else {}))
            recorder.write({"end": True, "test_accuracy": 0.9, "test_loss": 0.4})
            recorder.close()
        (self.whole / "summary.json").write_text('{"winner": "TopK won."}')

    def draw(self, rng: random.Random) -> Case:
        changes = [_change(rng) for _ in range(how_many(rng))]
        return {"base": 0, "changes": changes, "page": rng.randrange(DRAWN) == 0, "predicted": rng.random() < 0.5}

    def run(self, case: Case) -> None:
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.whole, self.here)
        for change in case["changes"]:
            _make(self.here / FILES[change["file"]], change)
        try:
            runs = find_runs([self.here])
            read = [Records.read(folder) for folder in runs]
            for records in read:
                network = Network(1e8, 2, 0.01) if case["predicted"] else None
                told = summarise(records, Target(records.run.metric, 0.5), network)
                json.dumps(told)
                has_ended(records.folder)
                records.run.command()
            if case["page"]:
                render(read, winner(self.here))
        except LabError as error:
            if not case["changes"]:
                raise Wrong(f"whole records are refused: {error}") from error
            raise


def _line(step: int) -> dict[str, Any]:
    line = {"step": step, "loss": 2.0 / step, "seconds": 0.1 * step, "step_s": 0.1, "collectives": 2, "density": 0.01}
    line |= {"payload_bytes": 1000.0, "wire_bytes": 2000.0, "measured_bytes": 2100.0, "validation_loss": 2.0 / step}
    return line | {"capture_s": 0.01, "select_s": 0.02, "exchange_s": 0.03, "apply_s": 0.01, "trips": 2}


def _change(rng: random.Random) -> dict[str, Any]:
    return {
        "what": rng.choice(("bytes", "bytes", "field", "field", "field", "remove", "delete", "lines", "folder")),
        "file": rng.randrange(len(FILES)),
        "bytes": change_of_bytes(rng),
        "at": [rng.random(), rng.random()],
        "junk": json_junk(rng),
    }


def _make(path: Path, change: dict[str, Any]) -> None:
    if not path.is_file():
        return
    if change["what"] == "bytes":
        path.write_bytes(changed_bytes(path.read_bytes(), change["bytes"]))
    elif change["what"] in ("delete", "folder"):
        path.unlink()
        if change["what"] == "folder":
            path.mkdir()
    else:
        _edit(path, change)


def _edit(path: Path, change: dict[str, Any]) -> None:
    """Another value, or none, in a field; or lines in another order."""
    raw = path.read_bytes()
    lines = raw.splitlines() if path.suffix == ".jsonl" else [raw]
    number = int(change["at"][0] * len(lines))
    if change["what"] == "lines":
        path.write_bytes(b"\n".join([*lines[number:], *lines[:number]]) + b"\n")
        return
    try:
        told = json.loads(lines[number])
        key = list(told)[int(change["at"][1] * len(told))]
    except (ValueError, IndexError, TypeError):
        return  # an earlier change has broken it
    if not isinstance(told, dict):
        return
    if change["what"] == "remove":
        del told[key]
    else:
        told[key] = change["junk"]
    lines[number] = json.dumps(told).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
