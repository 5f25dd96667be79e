"""Made-up records of runs, so that what is worked out from records can be checked against known answers."""

import json
from pathlib import Path

from thinwire.lab.records.record import Recorder, Run, rank_file


def write_run(
    folder: Path,
    method: str,
    *,
    steps: int = 40,
    workers: int = 2,
    step_s: float = 0.1,
    wire: float = 1000.0,
    measured: float | None = None,
    speed: float = 1.0,
    ended: bool = True,
    metric: str = "accuracy",
    **more: object,
) -> Run:
    """Accuracy climbs by speed / steps a step and is judged every tenth of the run."""
    run = Run(method, "digits", "mlp", workers=workers, steps=steps, evaluate_every=steps // 10, metric=metric)
    folder.mkdir(parents=True, exist_ok=True)
    run.write(folder)
    for rank in range(workers):
        recorder = Recorder(rank_file(folder, rank))
        recorder.write({"start": 0, "rank": rank, "pid": 1})
        recorder.write({"step": 0, "seconds": 0.0, "validation_accuracy": 0.1, "validation_loss": 2.3})
        for step in range(1, steps + 1):
            line: dict[str, object] = {
                "step": step,
                "loss": 2.3 - 2 * step / steps * min(1.0, speed) + 0.01 * rank,
                "seconds": step * step_s,
                "step_s": step_s,
                "payload_bytes": wire / 2,
                "wire_bytes": wire * (1 + rank),
            }
            if method not in ("DDP", "DDP-fp16"):
                line |= {"capture_s": 0.01, "select_s": 0.02, "exchange_s": 0.03, "apply_s": 0.01}
                line |= {"collectives": 2, "density": 0.01}
            if measured is not None:
                line["measured_bytes"] = measured * (1 + rank)
            if step % run.evaluate_every == 0:
                value = min(1.0, 0.1 + speed * step / steps)
                line |= {"validation_accuracy": value, "validation_loss": 2.3 - 2 * value}
            recorder.write(line | more)
        if ended:
            recorder.write({"end": True, "test_accuracy": 0.9, "test_loss": 0.4})
        recorder.close()
    return run


def read_json(path: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads(path.read_text())
    return read
