"""Training drawn at random, with faults, resumes and other numbers of workers: do the laws always hold?

    python benchmarks/soak.py --seconds 1800 --seed 0
    python benchmarks/soak.py --case soak-0-12.json

A case is a recipe and a few lives of it: local steps in threads (`soak_local`), or a model from `wrap` in processes
(`soak_wrap`). A life goes on from the set that the last one saved, perhaps with another number of workers, takes some
steps in one kind of loop and saves. In it something may go wrong on one rank. After each life the replicas are equal to
the bit; what went wrong has left no trace, to the bit; methods that send everything end where `Dense` does. A case that
fails is made smaller, written, and `--case` runs it again.
"""

import argparse
import json
import os
import random
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import soak_local
import soak_wrap
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.kernels import warm

Case = dict[str, Any]
DOORS: dict[str, Any] = {"local": soak_local, "wrap": soak_wrap}


def drawn(rng: random.Random) -> Case:
    return DOORS[rng.choice(tuple(DOORS))].drawn(rng)


def outcome(case: Case) -> str | None:
    """What is wrong with how a case went; None if nothing is."""
    door = DOORS[case["door"]]
    try:
        ends = door.lived(case)
        calm = door.calmed(case)
        if calm is not None and calm != case and not all(map(torch.equal, ends, door.lived(calm))):
            return "what went wrong has left a trace"
        if calm is not None and case["method"] in door.EXACT:
            for one, twin in zip(ends, door.lived(calm | {"method": "Dense()"}), strict=True):
                if not torch.allclose(one, twin, rtol=1e-3, atol=1e-4):
                    return f"{case['method']} ends {float((one - twin).abs().max())} away from Dense()"
    except Exception as error:
        return "".join(traceback.format_exception(error)[-8:])
    return None


def shrunk(case: Case) -> Case:
    """Without the lives, faults and steps that it can do without."""
    at = 0
    while at < len(case["lives"]):
        lives, life = case["lives"], case["lives"][at]
        calmer = [[], [life | {"fault": None}], [life | {"loop": "plain"}]]
        calmer += [[life | {key: 1}] for key in ("rounds", "world") if key in life]
        for fewer in calmer:
            tried = case | {"lives": lives[:at] + fewer + lives[at + 1 :]}
            if tried != case and tried["lives"] and outcome(tried):
                case = tried
                break
        else:
            at += 1
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=Path, help="run this one again")
    parser.add_argument("--out", type=Path, default=Path(), help="where a case that fails is written")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warm()
    if asked.case:
        why = outcome(json.loads(asked.case.read_text()))
        print(why or "this case goes well")
        return 1 if why else 0
    began, number = time.monotonic(), 0
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as bars:
        bar = bars.add_task("soak", total=asked.seconds)
        while not number or time.monotonic() - began < asked.seconds:
            case = drawn(random.Random(f"soak {asked.seed} {number}"))
            if why := outcome(case):
                path = asked.out / f"soak-{asked.seed}-{number}.json"
                path.write_text(json.dumps(case, indent=1) + "\n")  # whole, should shrinking it take for ever
                bars.stop()
                print(f"case {number} of --seed {asked.seed}:\n{why}")
                smaller = shrunk(case)
                if smaller != case and (why := outcome(smaller)):
                    path.write_text(json.dumps(smaller, indent=1) + "\n")
                    print(f"and the least of it that still fails:\n{why}")
                print(f"--case {path} runs it again")
                return 1
            number += 1
            bars.update(bar, completed=time.monotonic() - began, description=f"soak, {number} cases")
    print(f"{number} cases in {time.monotonic() - began:.0f} s: the laws held in all (--seed {asked.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
