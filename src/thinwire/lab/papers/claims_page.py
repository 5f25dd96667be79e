"""docs/claims.md: the table of claims, paper by paper."""

from collections.abc import Mapping

from thinwire.lab.papers import claims as c
from thinwire.lab.papers.claims import FAILS, HOLDS, OPEN, PARTLY, Claim, Row
from thinwire.lab.studies.kept import File

ALL = ("digits", "cifar10", "stdlib")
PAPERS: dict[str, list[Claim | Row]] = {
    "Sparse communication (random block)": [
        Row("Compressing has a cost of its own.", "selection and codec alone", "`python benchmarks/kernels.py`",
            "1.6 passes over the gradient for ExDyna, 2.8 for Variance ([table](speed.md#kernels))", HOLDS),
        Claim("Three parameters decide how schemes perform (which three is our guess).", "sparse", ALL,
              c.three_parameters),
        Claim("Random block sends less and stays close to SGD.", "sparse", ALL, c.close_to_sgd),
    ],
    "Variance-based compression": [
        Row("Updates wait until they are unambiguous.", "the rules, entry by entry",
            "`pytest tests/methods/test_variance.py`", "the same decisions as a loop over entries", HOLDS),
        Row("The variance costs next to nothing.", "seven nets, one thread", "`python benchmarks/moments.py`",
            "1.11 to 1.54 times a pass without it ([table](variance.md#what-it-costs))",
            f"{FAILS}: a matrix product more is not nothing"),
        Claim("Very high compression at the same accuracy.", "variance", ("digits", "stdlib"), c.high_compression),
        Claim("For convolutional nets too.", "variance", ("cifar10",), c.high_compression),
        Row("Cost models show which settings it enables.", "arithmetic", "`thinwire plan MODEL`",
            "it pays above a compression of half the workers ([table](variance.md#on-the-wire))", HOLDS),
    ],
    "Distributed auto-differentiation": [
        Row("A statistic smaller than the gradient.", "four nets, 2 to 16 workers", "`python benchmarks/dad.py`",
            "3.2 times smaller for an MLP with 2 workers, larger for an MLP with 16 and for most others "
            "([table](dad.md#when-it-pays))", f"{PARTLY}: wide layers, small batches"),
        Row("No effect on accuracy.", "every architecture of the tests", "`pytest tests/methods/test_dad.py`",
            "the mean gradient, to rounding", HOLDS),
        Row("Averaging during backpropagation allows flexible schemes.", "`boundary=`, `share=`",
            "`pytest tests/capture/test_layers_capture.py`", "deltas can be changed on their way down", HOLDS),
        Row("Room for existing compression methods on top.", "digits, 2 workers, one seed",
            "`thinwire compare --task digits --workers 2 --method DDP "
            '--method "RankDAD(4, bits=8, rest=ErrorFeedback(TopK(0.1)))"`',
            "97.2 % against 97.2 % at 1/43 of the bytes ([table](dad.md#compression-on-top))", HOLDS),
        Claim("Structured power iterations compress further without significant loss.", "rank", ALL,
              c.power_iterations),
        Claim("They show the dynamics of training.", "rank", ALL, c.dynamics, quality=False),
    ],
    "ExDyna": [
        Claim("No build-up.", "exdyna", ALL, c.no_build_up, quality=False),
        Claim("The density asked for, whatever the model and data.", "exdyna", ALL, c.asked_density, quality=False),
        Claim("Balanced work.", "exdyna", ALL, c.balanced, quality=False),
        Claim("Near-optimal cost at scale.", "exdyna", ALL, c.cost_at_scale, quality=False),
        Claim("Faster than the best sparsifiers at high accuracy.", "exdyna", ALL, c.fast_and_accurate),
    ],
}  # fmt: skip


def rows(files: Mapping[str, File]) -> dict[str, list[Row]]:
    return {
        paper: [row for claim in some for row in ([claim] if isinstance(claim, Row) else claim.rows(files))]
        for paper, some in PAPERS.items()
    }


def tables(files: Mapping[str, File]) -> str:
    """All papers' claims, one row each."""
    parts = []
    for paper, some in rows(files).items():
        lines = ["| claim | setting | command | measured | |", "| --- | --- | --- | --- | --- |"]
        lines += [f"| {r.claim} | {r.setting} | {r.command} | {r.measured} | **{r.verdict}** |" for r in some]
        parts += [f"## {paper}", "\n".join(lines)]
    return "\n" + "\n\n".join(parts) + "\n\n"


def counted(files: Mapping[str, File]) -> str:
    """How many of each, in a sentence: nobody has to count rows."""
    verdicts = [row.verdict.partition(":")[0] for some in rows(files).values() for row in some]
    told = [f"{kind}: {verdicts.count(kind)}" for kind in (HOLDS, PARTLY, FAILS, OPEN)]
    return f"\nOf {len(verdicts)} rows: {', '.join(told)}.\n\n"
