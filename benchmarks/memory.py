"""What a method keeps and what it allocates, in copies of the gradient.

    python benchmarks/memory.py [--numel 10000000] [--json FILE]

kept: bytes of all its state's tensors over bytes of the gradient. fresh: memory a warm step touches for the first time,
from the process's own page faults, so that every allocator is seen. One worker of four, the others answered dry.
"""

import argparse
import json
import resource
import statistics
from pathlib import Path

import torch
from _ratio import check

from thinwire import Layout, parse
from thinwire.comm.dry import DryComm
from thinwire.core.reducer import Moments

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


def measure(spelling: str, numel: int) -> tuple[float, float]:
    side = int(numel**0.5)
    layout = Layout(("w", "b"), (torch.Size([side, side]), torch.Size([side])))
    method, comm = parse(spelling), DryComm(4)
    state, fresh = method.init(layout), []
    square = torch.where(torch.rand(layout.numel) < 0.005, 0.01, 16.0)  # samples agree on one entry in two hundred
    x = torch.empty(layout.numel)
    for _ in range(8):
        x.normal_()
        local = Moments(x, square) if method.wants is Moments else x
        before = touched()
        method.reduce(local, state, comm, x)
        fresh.append(touched() - before)
    kept = sum(t.numel() * t.element_size() for t in all_tensors(state))
    return kept / (4 * layout.numel), statistics.median(fresh[3:]) / (4 * layout.numel)


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
    print(f"{'method':40} {'kept':>6} {'fresh a step':>13}")
    for spelling in METHODS:
        kept, fresh = measure(spelling, options.numel)
        rows[spelling] = {"kept": kept, "fresh": fresh}
        print(f"{spelling:40} {kept:6.2f} {fresh:13.4f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.against:
        check(_flat(rows), _flat(json.loads(options.against.read_text())))


def _flat(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Less than one per cent of a copy is as good as nothing."""
    return {f"{what}, {name}": max(0.01, value) for name, row in rows.items() for what, value in row.items()}


if __name__ == "__main__":
    main()
