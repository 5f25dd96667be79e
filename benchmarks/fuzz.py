"""Broken input, thousands of times: messages, checkpoints, spellings, links and records.

    python benchmarks/fuzz.py                       # 20 000 cases of each
    python benchmarks/fuzz.py wire --cases 500 --seed 7
    python benchmarks/fuzz.py --case fuzz-wire-7-12.json

A case is a thing that is right and a list of changes that damage it. Allowed is the right result, or an error that
thinwire itself raises with a sentence. Anything else ends with 1: the case is made smaller, change by change, and
written to a file that `--case` runs again. A case may take a minute and a gigabyte.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fuzz_checkpoints import Checkpoints
from fuzz_records import RecordsOfRuns
from fuzz_texts import Links, Spelling
from fuzz_things import Case, Fuzzer, Wrong
from fuzz_wire import Wire
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import thinwire
from thinwire.kernels import warm

SECONDS, BYTES = 60, 2**30  # that a case may take; on a busy machine a page alone takes several seconds
OURS = Path(thinwire.__file__).parent
FUZZERS: dict[str, type[Fuzzer]] = {
    "wire": Wire,
    "checkpoints": Checkpoints,
    "spelling": Spelling,
    "links": Links,
    "records": RecordsOfRuns,
}


class TooLong(BaseException):
    """Not an Exception, so that nothing on the way takes it for an error of its own."""


def outcome(fuzzer: Fuzzer, case: Case) -> str | None:
    """What is wrong with how a case went; None if nothing is."""
    before = _resident()
    try:
        with _limited():
            fuzzer.run(case)
    except Wrong as wrong:
        return str(wrong)
    except TooLong:
        return f"took more than {SECONDS} s"
    except Exception as error:
        if not _raised_by_us(error, fuzzer.errors):
            return "".join(traceback.format_exception(error)[-6:])
    if _resident() - before > BYTES:
        return f"took {(_resident() - before) / 2**20:.0f} MB"
    return None


def _raised_by_us(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Whether the innermost line is a `raise` of thinwire, of a kind that is promised, with a sentence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        isinstance(error, kinds)
        and len(str(error).split()) > 2
        and OURS in Path(last.filename).parents
        and (last.line or "").startswith("raise")
    )


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _limited() -> Iterator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shrunk(fuzzer: Fuzzer, case: Case) -> Case:
    """The case without all changes that it can do without."""
    at = 0
    while at < len(case["changes"]):
        fewer = case | {"changes": case["changes"][:at] + case["changes"][at + 1 :]}
        if outcome(fuzzer, fewer):
            case = fewer
        else:
            at += 1
    return case


def fuzz(name: str, cases: int, seed: int, bars: Progress, out: Path) -> bool:
    """Whether all cases went well; the first that did not is written."""
    bar = bars.add_task(name, total=cases)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = FUZZERS[name](Path(folder))
        for number in range(cases):
            case: Case = {"fuzzer": name} | fuzzer.draw(random.Random(f"{name} {seed} {number}"))
            if why := outcome(fuzzer, case):
                smaller, path = shrunk(fuzzer, case), out / f"fuzz-{name}-{seed}-{number}.json"
                if smaller != case and (still := outcome(fuzzer, smaller)):
                    case, why = smaller, still
                path.write_text(json.dumps(case, indent=1) + "\n")
                bars.console.print(
                    f"{name}: case {number} of --seed {seed} is wrong\n{why}\n--case {path} runs it again",
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip
                return False
            bars.advance(bar)
    return True


def again(path: Path) -> int:
    case: dict[str, Any] = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        why = outcome(FUZZERS[case["fuzzer"]](Path(folder)), case)
    print(why or "this case goes well")
    return 1 if why else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzers", nargs="*", help=f"{', '.join(FUZZERS)}; all if not given")
    parser.add_argument("--cases", type=int, default=20_000, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=Path, help="run this one again")
    parser.add_argument("--out", type=Path, default=Path(), help="where a case that fails is written")
    asked = parser.parse_args()
    if unknown := set(asked.fuzzers) - FUZZERS.keys():
        parser.error(f"there is no fuzzer {', '.join(sorted(unknown))}: there are {', '.join(FUZZERS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warm()
    if asked.case:
        return again(asked.case)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        good = [fuzz(name, asked.cases, asked.seed, bars, asked.out) for name in asked.fuzzers or FUZZERS]
    print(f"{sum(good)} of {len(good)} fuzzers found nothing, {asked.cases} cases each (--seed {asked.seed})")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
