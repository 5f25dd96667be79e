"""The documents' tables, figures and sentences, made of docs/studies/*.json: `python docs/make_studies.py`.

A page asks for them with a pair of comments. What lies between is made:

    <!-- made of sparse-digits: command settings figure says table -->
    <!-- end of made -->

A name stands for sparse-digits.json, and for sparse-digits-ANYTHING.json beside it: a study that was made in several
commands is shown in one picture. What nobody has measured yet is said to be so, with the command that would.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.lab import LabError
from thinwire.lab.papers import claims_page, recipe_table, tables
from thinwire.lab.papers.pictures import Picture, picture
from thinwire.lab.records.files import write_text
from thinwire.lab.studies.kept import File, read_all

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
    files = read_all(docs / "studies")
    texts: dict[Path, str] = {}
    for page in sorted(docs.glob("*.md")):
        text = page.read_text()
        if not BLOCK.search(text):
            continue
        texts[page] = BLOCK.sub(lambda b: b[1] + block(b[2], b[3].split(), files) + END, text)
        for _, name, parts in BLOCK.findall(text):
            if "figure" in parts.split() and (drawn := _picture(name, files)):
                texts[docs / "images" / f"{name}.svg"] = drawn.drawing.standalone()
    return texts


def block(name: str, parts: Sequence[str], files: Mapping[str, File]) -> str:
    """What stands in a page, a blank line around each part, as the site wants it."""
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
            said.append(f"![{drawn.drawing.title}](images/{name}.svg)")
        elif part == "says" and drawn is not None:
            said += ["\n".join(f"- {one}" for one in drawn.says)] if drawn.says else []
        elif part in ("command", "settings", "table"):
            said += [getattr(tables, part)(file) for file in here]
    return "\n" + "".join(f"{one}\n\n" for one in said)


def named(name: str, files: Mapping[str, File]) -> list[File]:
    return [file for other, file in files.items() if other == name or other.startswith(f"{name}-")]


def would_measure(name: str) -> str:
    study, _, task = name.partition("-")
    return f"`thinwire study {study} --task {task.partition('-')[0]} --page` measures it."


def _picture(name: str, files: Mapping[str, File]) -> Picture | None:
    here = named(name, files)
    return picture(here) if here else None
