"""What a method keeps and what it allocates, in copies of the gradient.

    python benchmarks/memory.py [--numel 10000000] [--json FILE]

kept: bytes of all its state's tensors over bytes of the gradient. way back: what the step keeps beside them, so that it
can be undone. fresh: memory a warm step touches for the first time, from the process's own page faults, so that every
allocator is seen. time: that of a step with a way back over the method's alone. One worker of four, the others answered
dry.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
from _ratio import check
from torch import nn

from thinwire import Layout, parse
from thinwire.comm.dry import DryComm
from thinwire.core.reducer import Moments
from thinwire.step.step import Steps

METHODS = ["Dense()", "ErrorFeedback(TopK(0.001))", "ErrorFeedback(ExDyna(0.001))", "ErrorFeedback(RandomBlock(0.01))"]
METHODS += ["ErrorFeedback(Threshold(9.0))", "ErrorFeedback(PowerSGD(4))", "ErrorFeedback(QSGD(4))"]
METHODS += [
    "ErrorFeedback(SignSGD())",
    "DGC(0.001)",
    "Momentum(ErrorFeedback(TopK(0.001)))",
    "Variance()",
    "Strom(9.0)",
]
PAGE = resource.getpagesize()


def touched() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * PAGE


def measure(spelling: str, numel: int) -> dict[str, float]:
    side = int(numel**0.5)
    shapes = {"w": torch.Size([side, side]), "b": torch.Size([side])}
    layout = Layout(tuple(shapes), tuple(shapes.values()))
    method, comm = parse(spelling), DryComm(4)
    steps = Steps(
        method, comm, {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}, grain="model"
    )
    group, alone = steps.make_group(layout), method.init(layout)
    square = torch.where(torch.rand(layout.numel) < 0.005, 0.01, 16.0)  # samples agree on one entry in two hundred
    x, fresh, ratios = torch.empty(layout.numel), [], []
    for _ in range(8):
        took = []
        for undone in (False, True):
            x.normal_()
            local = Moments(x, square) if method.wants is Moments else x
            before, began = touched(), time.thread_time()
            if undone:
                steps.open().reduce(group, local, x)
            else:
                method.reduce(local, alone, comm, x)
            took.append(time.thread_time() - began)
            fresh.append(touched() - before)
        ratios.append(took[1] / took[0])
    copy = 4 * layout.numel
    return {
        "kept": nbytes(group.state) / copy,
        "way back": nbytes(group.before) / copy,
        "fresh": statistics.median(fresh[6:]) / copy,
        "time": statistics.median(ratios[3:]),
    }


def nbytes(state: object) -> int:
    return sum(t.numel() * t.element_size() for t in all_tensors(state))


def all_tensors(state: object) -> list[torch.Tensor]:
    """Those of a state and of the states inside it, whatever they are for."""
    values = vars(state).values() if hasattr(state, "__dict__") else ()
    return [v for v in values if isinstance(v, torch.Tensor)] + [
        t for v in values for t in all_tensors(v) if not isinstance(v, torch.Tensor)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path, help="write the copies here")
    parser.add_argument("--against", type=Path, help="fail if more is kept or touched than is recorded here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print(f"{'method':40} {'kept':>6} {'way back':>9} {'fresh a step':>13} {'time':>6}")
    for spelling in METHODS:
        row = rows[spelling] = measure(spelling, options.numel)
        print(f"{spelling:40} {row['kept']:6.2f} {row['way back']:9.2f} {row['fresh']:13.4f} {row['time']:6.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.against:
        check(_flat(rows), _flat(json.loads(options.against.read_text())))


def _flat(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Less than one per cent of a copy is as good as nothing. Times are told, and not held: a few ms swing too much."""
    copies = ("kept", "way back", "fresh")
    return {f"{what}, {name}": max(0.01, row[what]) for name, row in rows.items() for what in copies}


if __name__ == "__main__":
    main()
