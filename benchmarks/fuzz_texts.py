"""Spellings of recipes and of links: what is read is written as what is read again, all else is refused in words."""

import random

from fuzz_things import Case, Fuzzer, Wrong, change_of_text, changed_text, how_many

from thinwire.lab import LabError
from thinwire.lab.run.links.spelling import Link, read_link
from thinwire.spelling import TABLE, parse

WORDS = [
    *"()[]{},=.:-+*'\"#\\ \n\t\x00é",
    *("0", "1", "-1", "0.5", "2.5", "1e999", "1e-400", "nan", "None", "True", "False", "''", "'x'", "()", "((0, 1),)"),
    *(
        "9" * 40,
        "((0, 1), (0, 2))",
        "[1]",
        "{}",
        "{'a': 1}",
        "{1: 2}",
        "{(): []}",
        "lambda: 0",
        "*",
        "**",
        "b'x'",
        "1j",
    ),
    *("...", "((((((((", "not ", "if", "__import__('os')", "density=", "inner=", "every=", "rank=", "bits=", "outer="),
    *(f"{name}()" for name in TABLE),
    *TABLE,
]
RECIPES = [
    *("Dense()", "TopK(0.1, agree=True)", "RandomBlock(0.1, agree=False, order='round_robin', seed=7)", "PowerSGD(4)"),
    *("Threshold(density=0.05, agree=True)", "DGC(0.1, nesterov=True, clip=1.0)", "QSGD(4, bucket=64, two_way=True)"),
    *("LowBit(1.6, block=100, smallest=0)", "DeMo(4, chunk=8)", "SparseLoCo(2, chunk=16, decay=1.0, bits=4)"),
    *("RankDAD(2, basis='own', energy=0.8)", "AutoDAD(exact=False, rank=2)", "Variance(1.5, feedback=True)"),
    *("VarianceStrom(1.0, tau=0.3)", "ExDyna(0.1, topology='static', blocks=10)", "MiCRO(0.1, control='official')"),
    *("CLTK(0.1, beta=0.3)", "SIDCo(0.1, fit='pareto')", "OkTopk(0.1, refresh=2)", "ErrorFeedback(GTopK(0.05))"),
    *("Momentum(ErrorFeedback(TopK(0.1)))", "Warmup(ErrorFeedback(TopK(0.1)), steps=2)", "Cast(Dense(), 'float16')"),
    *("Route(PowerSGD(2), rest=TopK(0.1))", "Adam(ErrorFeedback(TopK(0.1)))", "Strom(0.3)", "SignSGD()"),
    *("LocalSteps(Dense(), every=10)", "LocalSteps(ErrorFeedback(TopK(0.1)), every=((0, 1), (500, 10)), ahead=True)"),
    "LocalSteps(Dense(), every=5, outer=Outer(lr=0.7, momentum=0.9), fragments=2, delay=1)",
]
LINKS = [
    *("100mbit", "100mbit, 40ms, 0.1% loss", "20mbit up 100mbit down, 30ms +- 5ms", "1gbit, then 100mbit after 60s"),
    *("100mbit, 40ms; worker 3: 5mbit up, 400ms", "100mbit, then down after 30s, then up after 50s"),
    "1gbit, then 10mbit up after 5s; worker 0: 3% loss, then 9% loss after 7s; worker 2: 2mbit",
]
LINK_WORDS = [
    *("up", "down", "then ", "after ", "worker ", ";", ":", ",", "%", "loss", "ms", "us", "s", "bit", "mbit", "gbit"),
    *(
        "0",
        "1",
        "-1",
        "0.0",
        "1e9",
        ".",
        "..",
        "1.2.3",
        "9" * 400,
        "9" * 30,
        "+-",
        "±",
        "nan",
        "inf",
        " ",
        "\n",
        "²",
        "٣",
    ),
    *("worker 3: 1mbit", "; worker 3:", "100% loss", "0mbit", "5s", "then down after 0s"),
]


class Spelling(Fuzzer):
    errors = (ValueError, TypeError)
    texts, words = RECIPES, WORDS

    def draw(self, rng: random.Random) -> Case:
        base = rng.randrange(len(self.texts))
        return {"base": base, "changes": [change_of_text(rng, self.words) for _ in range(how_many(rng))]}

    def run(self, case: Case) -> None:
        text = self.texts[case["base"]]
        for change in case["changes"]:
            text = changed_text(text, change)
        try:
            self.read(text)
        except self.errors as error:
            if not case["changes"]:
                raise Wrong(f"{text} is refused: {error}") from error
            raise

    def read(self, text: str) -> None:
        recipe = parse(text)
        if parse(repr(recipe)) != recipe or repr(parse(repr(recipe))) != repr(recipe):
            raise Wrong(f"{text!r} is {recipe!r}, which is {parse(repr(recipe))!r}")


class Links(Spelling):
    errors = (LabError,)
    texts, words = LINKS, LINK_WORDS

    def read(self, text: str) -> None:
        link = read_link(text, None)
        if link is None or repr(Link.parse(repr(link))) != repr(link):
            raise Wrong(f"{text!r} is {link!r}, which is read as something else")
        link.network(4)
