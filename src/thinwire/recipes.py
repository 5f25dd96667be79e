"""Recipes by name: a method, when it exchanges, and the optimizer's settings that it was measured with.

A recipe stands here only with the command that measured it, so that whoever doubts it can measure again. To add one,
add an entry to RECIPES. Then it can be imported, the command line takes its name wherever it takes a method, and
`python docs/make_studies.py` puts it into the table of docs/recipes.md:

    from thinwire.recipes import GPT_100            # the entry "gpt-100"
    handle = thinwire.local(model, optimizer, GPT_100.method())
    thinwire compare --method gpt-100
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.spelling import Recipe as Method
from thinwire.spelling import recipe_of
from thinwire.wrappers.local_steps import LocalSteps


@dataclass(frozen=True)
class Recipe:
    """What to use and when, with its evidence."""

    spelling: str  # of a reducer, or of LocalSteps
    optimizer: str  # sgd, adamw or muon, with which it was measured
    use: str  # for which link, model and number of workers, in one line
    measured: str  # the command that measured it
    told: str  # what that command said: quality and bytes beside those of dense
    settings: Mapping[str, float] = field(default_factory=dict)  # of the optimizer: lr, muon_lr, beta2, clip, ...
    advice: str = ""  # how to set the optimizer for another model, in one line

    @property
    def local(self) -> bool:
        """Whether it goes to `thinwire.local`, with the optimizer; else to `thinwire.wrap`."""
        return isinstance(self.method(), LocalSteps)

    def method(self) -> Method:
        return recipe_of(self.spelling)


_DIGITS = (
    "thinwire study frontier --rehearse --task digits --workers 4 --steps 600 --evaluate-every 100 --schedule linear "
    "--optimizer sgd --rates 1,2 --seeds 3 --method 'Dense()' --method 'LocalSteps(ErrorFeedback(LowBit(2)), every=3)' "
    "--method 'LocalSteps(ErrorFeedback(LowBit(2)), every=10)' "
    "--method 'LocalSteps(ErrorFeedback(LowBit(2)), every=30)' "
    "--method 'LocalSteps(ErrorFeedback(LowBit(1)), every=66)'"
)


def _of_digits(spelling: str, told: str, lr: float = 0.05) -> Recipe:
    use = "small MLPs under SGD with momentum; on larger data look at the loss first"
    told = f"digits, validation accuracy {told}; dense 97.2 % (mean of three seeds)"
    return Recipe(spelling, "sgd", use, _DIGITS, told, {"lr": lr, "momentum": 0.9})


RECIPES: dict[str, Recipe] = {  # names are words with dashes, which no spelling can be
    "gpt-100": Recipe(
        "LocalSteps(ErrorFeedback(LowBit(2)), every=7, outer=Outer(1.0, keep_length=1.0))",
        "muon",
        "models like GPT, four workers, a link that carries a hundredth of the bytes",
        "thinwire study frontier --rehearse --task stdlib --workers 4 --steps 2000 --evaluate-every 250 "
        "--schedule linear --clip 1 --beta2 0.99 --optimizer muon --lr 0.012 --muon-lr 0.03 "
        "--method 'LocalSteps(ErrorFeedback(LowBit(2)), every=7, outer=Outer(1.0, keep_length=1.0))'",
        "validation loss 0.994 at 1/101 of the bytes; dense AdamW 1.132, dense Muon 0.972 (one seed)",
        {"lr": 0.012, "muon_lr": 0.03, "beta2": 0.99, "clip": 1.0},
        "One and a half times the rates of the dense Muon run, which ends at 0.973 at twice its rates.",
    ),
    "gpt-300": Recipe(
        "LocalSteps(ErrorFeedback(LowBit(1)), every=12, outer=Outer(1.0, keep_length=1.0))",
        "muon",
        "models like GPT, four workers, a link that carries a three-hundredth of the bytes",
        "thinwire study frontier --rehearse --task stdlib --workers 4 --steps 2000 --evaluate-every 250 "
        "--schedule linear --clip 1 --beta2 0.99 --optimizer muon --lr 0.012 --muon-lr 0.03 "
        "--method 'LocalSteps(ErrorFeedback(LowBit(1)), every=12, outer=Outer(1.0, keep_length=1.0))'",
        "validation loss 1.024 at 1/312 of the bytes; dense AdamW 1.132, dense Muon 0.972 (one seed)",
        {"lr": 0.012, "muon_lr": 0.03, "beta2": 0.99, "clip": 1.0},
        "The same rates as gpt-100.",
    ),
    "mlp-30": _of_digits("LocalSteps(ErrorFeedback(LowBit(2)), every=3)", "97.2 % at 1/32 of the bytes"),
    "mlp-100": _of_digits("LocalSteps(ErrorFeedback(LowBit(2)), every=10)", "97.2 % at 1/107"),
    "mlp-300": _of_digits("LocalSteps(ErrorFeedback(LowBit(2)), every=30)", "97.2 % at 1/321"),
    "mlp-900": _of_digits("LocalSteps(ErrorFeedback(LowBit(1)), every=66)", "97.2 % at 1/967", lr=0.1),
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`: gpt-100, or GPT_100 as it is imported."""
    if (known := find(name)) is not None:
        return known
    near = difflib.get_close_matches(name, RECIPES, n=1)
    there = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(RECIPES)) or 'none yet'}"
    raise KeyError(f"there is no recipe {name}: {there}")


def find(name: str) -> Recipe | None:
    return RECIPES.get(name.lower().replace("_", "-"))


def __getattr__(name: str) -> Recipe:
    found = find(name) if name.isupper() else None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: recipes are {', '.join(constants())}")
    return found


def __dir__() -> list[str]:
    return [*globals(), *constants()]


def constants() -> list[str]:
    """The names by which recipes are imported."""
    return [name.upper().replace("-", "_") for name in RECIPES]
