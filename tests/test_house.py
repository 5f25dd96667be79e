"""The rules of the house that a machine can check."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "thinwire"

# A module imports only from modules earlier in this order, so that a reader can go from one end to the other.
ORDER = """comm rules factors reducer memory kernels wire exchange introspect feedback methods compose spelling agree
lane capture checkpoint ddp local plan testing lab cli __main__""".split()  # noqa: SIM905  a list to be read


def part(module: str) -> str:
    return module.split(".")[1] if module.startswith("thinwire.") else ""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "thinwire":
            found |= {f"thinwire.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if part(name)}


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert here in ORDER, f"{here} has no place in the order of modules: give it one"
    for name in imports(path):
        assert part(name) in ORDER, f"{path.name} imports {name}, which has no place in the order"
        assert ORDER.index(part(name)) <= ORDER.index(here), f"{here} comes before {part(name)} and may not import it"


def test_every_public_name_says_what_it_is():
    import thinwire

    for name in dir(thinwire):
        thing = getattr(thinwire, name)
        if not name.startswith("_") and callable(thing):
            assert thing.__doc__, f"thinwire.{name} has no docstring"


def test_no_hook_module_postpones_its_annotations():
    # DDP compares a hook's annotations by identity; strings make it refuse the hook.
    for path in (SOURCE / "capture").glob("*.py"):
        assert "from __future__ import annotations" not in path.read_text(), path


def test_the_page_of_methods_is_up_to_date():
    docs = SOURCE.parent.parent / "docs"
    maker = {"__name__": "make_methods", "__file__": str(docs / "make_methods.py")}
    exec(compile((docs / "make_methods.py").read_text(), "make_methods.py", "exec"), maker)
    assert (docs / "methods.md").read_text() == maker["page"](), "run python docs/make_methods.py"
