"""The documents' tables, figures and sentences, made of docs/studies/*.json: `python docs/make_studies.py`.

A page asks for them with a pair of comments. What lies between is made:

    <!-- made of sparse-digits: command settings figure says table -->
    <!-- end of made -->

A name stands for sparse-digits.json, and for sparse-digits-ANYTHING.json beside it: a study that was made in several
commands is shown in one picture. `compare-demo` stands for a comparison, docs/comparisons/demo.json. What nobody has
measured yet is said to be so, with the command that would. README.md beside the folder is a page too.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.lab import LabError
from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.papers import claims_page, comparisons, recipe_table, tables
from thinwire.lab.papers.comparisons import Comparison
from thinwire.lab.papers.pictures import Picture, picture
from thinwire.lab.records.files import write_text
from thinwire.lab.studies.kept import File, named, read_all

END = "<!-- end of made -->\n"
BLOCK = re.compile(rf"(<!-- made of ([\w.-]+): ([\w ]+) -->\n).*?{re.escape(END)}", re.DOTALL)
PARTS = ("command", "settings", "figure", "says", "table")


def make(docs: Path) -> list[Path]:
    """Write everything anew; what changed."""
    changed = []
    for path, text in made(docs).items():
        if not path.exists() or path.read_text() != text:
            write_text(path, text)
            changed.append(path)
    return changed


def made(docs: Path) -> dict[Path, str]:
    """Every file that is made of the kept results, and what it holds."""
    files, compared = read_all(docs / "studies"), comparisons.read_all(docs / "comparisons")
    texts: dict[Path, str] = {}
    for page in [*sorted(docs.glob("*.md")), *docs.parent.glob("README.md")]:
        text = page.read_text()
        if not BLOCK.search(text):
            continue
        images = "images" if page.parent == docs else f"{docs.name}/images"
        texts[page] = BLOCK.sub(lambda b: b[1] + block(b[2], b[3].split(), files, compared, images) + END, text)  # noqa: B023
        for _, name, parts in BLOCK.findall(text):
            if "figure" in parts.split() and (drawn := _drawing(name, files, compared)):
                texts[docs / "images" / f"{name}.svg"] = drawn.standalone()
    return texts


def block(
    name: str,
    parts: Sequence[str],
    files: Mapping[str, File],
    compared: Mapping[str, Comparison] | None = None,
    images: str = "images",
) -> str:
    """What stands in a page, a blank line around each part, as the site wants it."""
    if name.startswith(comparisons.PREFIX):
        return _compared(name, parts, compared or {}, images)
    if name == "recipes":
        return recipe_table.table()
    if name == "claims":
        return "".join({"count": claims_page.counted, "rows": claims_page.tables}[part](files) for part in parts)
    here = named(name, files)
    if wrong := [part for part in parts if part not in PARTS]:
        raise LabError(f"a page asks for the {wrong[0]} of {name}: there are {', '.join(PARTS)}")
    if not here:
        return f"\nNot measured yet: {would_measure(name)}\n\n"
    drawn = _picture(name, files)
    said: list[str] = []
    for part in parts:
        if part == "figure" and drawn is not None:
            said.append(f"![{drawn.drawing.title}]({images}/{name}.svg)")
        elif part == "says" and drawn is not None:
            said += ["\n".join(f"- {one}" for one in drawn.says)] if drawn.says else []
        elif part == "command":
            said += [tables.command(file) for file in here]
        elif part in ("settings", "table"):
            said.append(getattr(tables, part)(here))
    return "\n" + "".join(f"{one}\n\n" for one in said)


def _compared(name: str, parts: Sequence[str], compared: Mapping[str, Comparison], images: str) -> str:
    here = comparisons.named(name, compared)
    if wrong := [part for part in parts if part not in ("command", "figure", "says", "table")]:
        raise LabError(f"a page asks for the {wrong[0]} of {name}: a comparison has a command, figure, says and table")
    if not here:
        raise LabError(f"there is no docs/comparisons/{name.removeprefix(comparisons.PREFIX)}.json, which a page shows")
    said = []
    for part in parts:
        if part == "figure":
            said.append(f"![{comparisons.draw(here).title}]({images}/{name}.svg)")
        else:
            said += [getattr(comparisons, part)(file) for file in here]
    return "\n" + "".join(f"{one}\n\n" for one in said)


def would_measure(name: str) -> str:
    study, _, task = name.partition("-")
    return f"`thinwire study {study} --task {task.partition('-')[0]} --page` measures it."


def _picture(name: str, files: Mapping[str, File]) -> Picture | None:
    here = named(name, files)
    return picture(here) if here else None


def _drawing(name: str, files: Mapping[str, File], compared: Mapping[str, Comparison]) -> Drawing | None:
    if here := comparisons.named(name, compared) if name.startswith(comparisons.PREFIX) else []:
        return comparisons.draw(here)
    found = _picture(name, files)
    return found.drawing if found else None
