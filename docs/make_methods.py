"""Writes docs/methods.md from the methods' own docstrings: python docs/make_methods.py"""

import inspect
import sys
from pathlib import Path

from thinwire.methods import METHODS
from thinwire.spelling import WRAPPERS

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


def kinds() -> dict[str, tuple[str, list[str]]]:
    """The table above, with every method that nobody has put into it at the end."""
    placed = {name for _, names in KINDS.values() for name in names}
    others = [name for name in METHODS if name not in placed]
    return {**KINDS, "Others": ("", others)} if others else KINDS


def page() -> str:
    parts = [HEAD]
    for kind, (said, names) in kinds().items():
        parts += [f"## {kind}", *filter(None, [said]), *(section(name, METHODS[name]) for name in names)]
    parts += ["## Wrappers", AROUND, *(section(name, wrapper) for name, wrapper in WRAPPERS.items()), END]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
