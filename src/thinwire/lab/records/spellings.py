"""How a run's method is spelled: a recipe of thinwire's, or torch's own DDP beside them.

`ErrorFeedback(TopK(0.01))` exchanges gradients at every step, `LocalSteps(Dense(), every=10)` what ten local steps have
changed, `DDP`, `DDP('fp16')` and the like are baselines. The forms of version 0.1 are read as well:
`Dense() every 50 outer 0.7 0.9`, `ErrorFeedback(ExDyna(0.01)) every 1 ahead`, `DDP-fp16`, `no-exchange`; and the name
of a recipe stands for its method.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from thinwire import spelling
from thinwire.core.reducer import Reducer
from thinwire.core.spelled import Spelled
from thinwire.lab import LabError
from thinwire.recipes import find
from thinwire.wrappers.local_steps import LocalSteps

Hook = Literal["plain", "fp16", "bf16", "powersgd", "none"]


@dataclass(frozen=True, repr=False)
class DDP(Spelled):
    """Torch's own exchange: plain, or through one of its hooks; 'none' exchanges nothing, the floor of a step's time.

    rank: of the matrices that the hook 'powersgd' sends.
    """

    hook: Hook = "plain"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.hook not in get_args(Hook):
            raise ValueError(f"DDP's hook is {', '.join(get_args(Hook))}, not {self.hook!r}")
        if self.rank < 1:
            raise ValueError(f"rank must be 1 or more, not {self.rank}")

    def __repr__(self) -> str:
        return "DDP" if self == PLAIN else Spelled.__repr__(self)


PLAIN, NOTHING = DDP(), DDP("none")
Method = spelling.Recipe | DDP
_TABLE: spelling.Table = {**spelling.TABLE, "DDP": DDP}
_OLD = {"DDP-fp16": "DDP('fp16')", "no-exchange": "DDP('none')"}


def method_of(text: str) -> Method:
    """What a run is told to exchange with; a text that spells nothing of the kind is refused."""
    try:
        method = spelling.parse(_modern(text), _TABLE)
    except (TypeError, ValueError) as error:
        raise LabError(f"{error}; baselines are DDP, DDP('fp16'), DDP('bf16'), DDP('powersgd'), DDP('none')") from error
    if not isinstance(method, (Reducer, LocalSteps, DDP)):
        raise LabError(f"{text} is no method of its own: write LocalSteps(Dense(), every=10, outer=Outer(0.7))")
    return method


def canonical(text: str) -> str:
    """The one spelling of a method."""
    return repr(method_of(text))


def label(text: str) -> str:
    """The same of what a record says, which may be of another version: what spells nothing stays as it is."""
    try:
        return canonical(text)
    except LabError:
        return text


def reducer_in(method: Method) -> Reducer | None:
    """The reducer that a method exchanges through; torch's own have none."""
    if isinstance(method, DDP):
        return None
    return method.inner if isinstance(method, LocalSteps) else method


def _modern(text: str) -> str:
    """The spelling of today for one of version 0.1."""
    reducer, timed, when = text.strip().rpartition(" every ")
    if not timed:
        known = find(text.strip())
        return known.spelling if known else _OLD.get(text.strip(), text)
    match when.split():
        case [every]:
            return f"LocalSteps({reducer}, every={every})"
        case [every, "ahead"]:
            return f"LocalSteps({reducer}, every={every}, ahead=True)"
        case [every, "outer", rate, momentum]:
            return f"LocalSteps({reducer}, every={every}, outer={_outer(rate, momentum)})"
        case _:
            raise ValueError(
                f"{text!r} is not spelled like LocalSteps(Dense(), every=10), nor like Dense() every 10, "
                "Dense() every 10 outer 0.7 0.9, ErrorFeedback(TopK(0.1)) every 1 ahead"
            )


def _outer(rate: str, momentum: str) -> str:
    try:
        return f"Outer({float(rate)}, {float(momentum)}, nesterov={float(momentum) > 0})"
    except ValueError as error:
        raise ValueError(
            f"an outer step is a learning rate and a momentum, outer 0.7 0.9, not {rate} {momentum}"
        ) from error
