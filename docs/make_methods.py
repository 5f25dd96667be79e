"""Writes docs/methods.md from the methods' own docstrings: python docs/make_methods.py"""

import inspect
import sys
from pathlib import Path

import torch

from thinwire.core.reducer import Layout
from thinwire.exchange.price import Network, price
from thinwire.methods import METHODS
from thinwire.spelling import WRAPPERS, parse

PAGE = Path(__file__).parent / "methods.md"
HEAD = """# Methods

```bash
thinwire methods
```

prints this list in a terminal. To use a method, pass it to `wrap`, or pass its spelling:

```python
model = thinwire.wrap(model, thinwire.ErrorFeedback(thinwire.TopK(0.01)))
model = thinwire.wrap(model, "ErrorFeedback(TopK(0.01))")
```

[Choose a method](choose.md) asks five questions and names one. Words such as *residual* and *density* are in the
[glossary](glossary.md).
"""
KINDS = {  # what is sent: a sentence for newcomers, and the methods
    "Everything": ("Every entry of the gradient, at every step.", ["Dense"]),
    "The largest entries": (
        "A sparsifier sends the largest entries and leaves the rest in the residual. Put `ErrorFeedback` around it, "
        "except around `CLTK`, `DGC`, `DeMo` and `SparseLoCo`, which keep a memory of their own.",
        "ExDyna TopK DGC CLTK DEFT GTopK MiCRO OkTopk SIDCo Threshold DeMo SparseLoCo".split(),  # noqa: SIM905
    ),
    "Random entries": (
        "A random part of the gradient. No search, and no positions on the wire.",
        ["RandomBlock", "RandomK"],
    ),
    "Entries whose sign is certain": (
        "An entry is sent once the samples agree on its sign, or once it is large. You choose no density.",
        ["Variance", "VarianceStrom", "Strom"],
    ),
    "Low rank": ("Each gradient matrix as a product of two thin ones.", ["PowerSGD", "RankDAD", "PublishedRankDAD"]),
    "A layer's inputs and deltas": (
        "The two factors of a layer's gradient are sent instead of the gradient. The result is exact.",
        ["DAD", "EDAD", "AutoDAD"],
    ),
    "Few bits": ("Every entry, in 1 to 8 bits.", ["LowBit", "QSGD", "SignSGD"]),
}
AROUND = "Combine them with any method: `ErrorFeedback(TopK(0.01))`, `Momentum(ErrorFeedback(ExDyna(0.01)))`."
LAYOUT = Layout(("a", "b", "c", "d"), tuple(map(torch.Size, ((256, 128), (256,), (128, 256), (128,)))))
FAR = Network(1e8, 4, 0.04)
USUAL = {  # the spelling in which a method is used, where that is not its name alone
    **{name: f"ErrorFeedback({name}(0.01))" for name in ("ExDyna", "TopK", "DEFT", "GTopK", "MiCRO", "SIDCo")},
    **{name: f"ErrorFeedback({name}(0.1))" for name in ("RandomBlock", "RandomK")},
    **{name: f"{name}(0.01)" for name in ("DGC", "CLTK", "OkTopk")},
    "Threshold": "ErrorFeedback(Threshold(20.0))",
    "VarianceStrom": "VarianceStrom(1.0, tau=3.0)",
    "Strom": "Strom(10.0)",
    "PowerSGD": "ErrorFeedback(PowerSGD(4))",
    "LowBit": "ErrorFeedback(LowBit(2))",
    "SignSGD": "ErrorFeedback(SignSGD())",
}
SITES = """## Between sites

On a link with latency a step takes its *trips* (messages that wait for one another, the roll call included) times the
round trip, and its bytes divided by the rate. Below is what a dry run of each method sends: four workers,
40 ms, 100 Mbit/s, two layers of 256 x 128 with biases, 32 rows a step. `gradient` stands for the bytes of the whole
gradient in float32. A larger model may send another share, and a long mean takes two trips: ask `thinwire plan`.
DDP's ring takes 6 trips and 1.5 x gradient / rate.

| method | trips | time of an exchange |
| --- | --- | --- |
"""
END = """## How this page is made

`python docs/make_methods.py` writes it from the docstrings, and a test compares the two. "Read" and "recalled" beside
a paper say what its docstring rests on: on the text or code that was read, or on memory.
"""


def section(name: str, method: type) -> str:
    module = inspect.getdoc(sys.modules[method.__module__]) or ""
    signature = str(inspect.signature(method)).replace("thinwire.core.reducer.", "").removesuffix(" -> None")
    parts = [f"### {name}", f"```python\n{name}{signature}\n```", inspect.getdoc(method) or ""]
    alone = [one for one in METHODS.values() if one.__module__ == method.__module__]
    if len(alone) == 1:  # a module with one method tells of its paper
        parts.append(f'<details markdown="1"><summary>The algorithm</summary>\n\n{module}\n\n</details>')
    return "\n\n".join(parts)


def between_sites() -> str:
    """A row for each method, from a dry run of it."""
    rows = []
    for name in METHODS:
        spelled = USUAL.get(name, f"{name}()")
        cost = price(parse(spelled), LAYOUT, FAR.workers, link=FAR.link)
        trips = cost.trips(FAR)
        share = (cost.exchange(FAR) - trips * FAR.rtt) * FAR.rate / 8 / (4 * LAYOUT.numel)
        rows.append(f"| `{spelled}` | {trips:.0f} | {trips:.0f} x round trip + {share:.2g} x gradient / rate |")
    return SITES + "\n".join(rows)


def kinds() -> dict[str, tuple[str, list[str]]]:
    """The table above, with every method that nobody has put into it at the end."""
    placed = {name for _, names in KINDS.values() for name in names}
    others = [name for name in METHODS if name not in placed]
    return {**KINDS, "Others": ("", others)} if others else KINDS


def page() -> str:
    parts = [HEAD]
    for kind, (said, names) in kinds().items():
        parts += [f"## {kind}", *filter(None, [said]), *(section(name, METHODS[name]) for name in names)]
    parts += ["## Wrappers", AROUND, *(section(name, wrapper) for name, wrapper in WRAPPERS.items())]
    parts += [between_sites(), END]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
