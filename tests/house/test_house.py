"""The rules of the house that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"

# A module imports only from modules earlier in this order, so that a reader can go from one end to the other.
ORDER = """_moved comm core kernels exchange methods wrappers spelling recipes step capture doors integrations plan
testing lab cli __main__""".split()  # noqa: SIM905  a list to be read
ROOMS = [name for name in ORDER if (SOURCE / name).is_dir()]

LONGEST = 350
LONG: dict[str, str] = {}  # files that are longer, each with the reason why it is not two
# Modules that know one another, which nobody can read one after the other. This list only gets shorter.
KNOTS: set[frozenset[str]] = {
    frozenset({"thinwire.capture.layers.factors.backward", "thinwire.capture.layers.factors.slots"}),
}


def name_of(path: Path) -> str:
    parts = ("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
INSIDE = [name for name in MODULES if name != "thinwire"]  # whose names are loaded when they are used


def part(module: str) -> str:
    """The room of a module, or the module itself if it stands alone."""
    return module.split(".")[1] if module.startswith("thinwire.") else ""


def imports(name: str) -> set[str]:
    """The modules of thinwire that this one imports, wherever in it that stands."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            found |= {inner if (inner := f"{home}.{alias.name}") in MODULES else home for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if part(module)} - {name}


@pytest.mark.parametrize(("file", "above"), [("here.py", "thinwire.room"), ("__init__.py", "thinwire.room.here")])
def test_relative_imports_are_seen(file, above, tmp_path, monkeypatch):
    (tmp_path / file).write_text("import os\nfrom . import a\nfrom .b import c\nfrom ..comm import d\n")
    monkeypatch.setitem(MODULES, "thinwire.room.here", tmp_path / file)
    assert imports("thinwire.room.here") == {above, f"{above}.b", f"{above.rpartition('.')[0]}.comm"} - {
        "thinwire.room.here"
    }


@pytest.mark.parametrize("name", INSIDE)
def test_imports_go_one_way(name):
    here = part(name)
    assert here in ORDER, f"{here} has no place in the order of modules: give it one"
    for other in imports(name):
        assert part(other) in ORDER, f"{name} imports {other}, which has no place in the order"
        assert ORDER.index(part(other)) <= ORDER.index(here), f"{here} comes before {part(other)} and may not import it"


def knots() -> set[frozenset[str]]:
    """Sets of modules that import one another, directly or by way of others."""
    reach = {name: imports(name) & set(INSIDE) for name in INSIDE}
    while True:
        further = {name: near.union(*(reach[other] for other in near)) for name, near in reach.items()}
        if further == reach:
            break
        reach = further
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in INSIDE if name in reach[name]}


def test_imports_inside_a_room_go_one_way_too():
    assert knots() == KNOTS, "a new knot: undo it; one less: take it off the list"


@pytest.mark.parametrize("name", [name for name in INSIDE if part(name) == "capture"])
def test_a_capture_knows_no_method_and_no_other_capture(name):
    mine = name.split(".")[2:3]
    for other in imports(name):
        if part(other) in ("methods", "wrappers", "spelling"):
            pytest.fail(f"{name} imports {other}: a door joins them")
        if part(other) == "capture":
            assert other.split(".")[2:3] in ([], mine), f"{name} imports {other}: captures stand alone"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_belongs_there(room):
    said = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text()))
    assert said and len(said.splitlines()) >= 3, (
        f"{room}/__init__.py: three lines, what belongs here, what it may touch"
    )


def test_files_are_short():
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {name for name, count in lines.items() if count > LONGEST} == LONG.keys()


def test_every_public_name_says_what_it_is():
    import thinwire

    for name in dir(thinwire):
        thing = getattr(thinwire, name)
        if not name.startswith("_") and callable(thing):
            assert thing.__doc__, f"thinwire.{name} has no docstring"


def test_no_hook_module_postpones_its_annotations():
    # DDP compares a hook's annotations by identity; strings make it refuse the hook.
    for path in (SOURCE / "capture").rglob("*.py"):
        assert "from __future__ import annotations" not in path.read_text(), path


def test_the_page_of_methods_is_up_to_date():
    docs = ROOT / "docs"
    maker = {"__name__": "make_methods", "__file__": str(docs / "make_methods.py")}
    exec(compile((docs / "make_methods.py").read_text(), "make_methods.py", "exec"), maker)
    assert (docs / "methods.md").read_text() == maker["page"](), "run python docs/make_methods.py"


def test_pages_name_tests_that_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]:
        for named in re.findall(r"\btests/[\w/]+\.py\b", page.read_text()):
            assert (ROOT / named).exists(), f"{page.name} names {named}"
