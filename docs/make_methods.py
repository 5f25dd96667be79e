"""Writes docs/methods.md from the methods' own docstrings: python docs/make_methods.py"""

import inspect
import sys
from pathlib import Path

from thinwire.methods import METHODS
from thinwire.spelling import WRAPPERS

PAGE = Path(__file__).parent / "methods.md"
HEAD = """# Methods

This page is made from the docstrings: `python docs/make_methods.py`. A test holds it to them.
"""


def section(name: str, method: type) -> str:
    module = inspect.getdoc(sys.modules[method.__module__]) or ""
    signature = str(inspect.signature(method)).replace("thinwire.reducer.", "").removesuffix(" -> None")
    parts = [f"## {name}", f"```python\n{name}{signature}\n```", inspect.getdoc(method) or ""]
    alone = [one for one in METHODS.values() if one.__module__ == method.__module__]
    if len(alone) == 1:  # a module with one method tells of its paper
        parts.append(f"<details><summary>The algorithm</summary>\n\n{module}\n\n</details>")
    return "\n\n".join(parts)


def page() -> str:
    methods = "\n\n".join(section(name, method) for name, method in METHODS.items())
    around = "\n\n".join(section(name, wrapper) for name, wrapper in WRAPPERS.items())
    return f"{HEAD}\n{methods}\n\n# What stands around them\n\n{around}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
