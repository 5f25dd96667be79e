"""The page around a table and drawings: self-contained, for wide and narrow screens, paper, day and night."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from thinwire.lab.pages import ink
from thinwire.lab.pages.pieces import Drawing


@dataclass(frozen=True)
class Row:
    """A row of the table. `values` sort it where a cell's text does not; a run that failed has a reason instead."""

    cells: Sequence[str]
    values: Sequence[float | None] | None = None
    slot: int | None = None
    failed: str = ""


@dataclass(frozen=True)
class Section:
    heading: str
    drawings: Sequence[Drawing]
    note: str = ""
    folded: bool = False
    wide: tuple[Drawing, Drawing] | None = None  # one drawing across the page, and the same for a phone


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    head: Sequence[str]
    rows: Sequence[Row]
    sections: Sequence[Section]
    commands: Sequence[str]
    sub: str = ""
    legend_note: str = field(default="Labels leave out ErrorFeedback( ); the table has the whole spelling.")

    def render(self) -> str:
        legend = self._legend()
        slots = 1 + max([*legend, *(row.slot or 0 for row in self.rows)], default=0)
        parts = {
            "TITLE": escape(self.title),
            "SUB": escape(self.sub),
            "LEAD": escape(self.lead),
            "TABLE": self._table(),
            "LEGEND": _legend(legend, self.legend_note),
            "SECTIONS": "\n".join(map(_section, self.sections)),
            "COMMANDS": escape("\n".join(self.commands)),
            "INK": ink.stylesheet(slots),
            "CSS": _template("report.css"),
            "JS": _template("report.js"),
        }
        # In one pass, so that nothing in a part is taken for a place; what is escaped has no "<!--" anyway.
        return re.sub(r"<!--([A-Z]+)-->", lambda found: parts[found[1]], _template("report.html"))

    def _legend(self) -> dict[int, tuple[str, str]]:
        drawn = [one for section in self.sections for one in (*section.drawings, *(section.wide or ()))]
        shown = {one.slot: (one.label or one.name, one.name) for drawing in drawn for one in drawing.series}
        return dict(sorted(shown.items()))

    def _table(self) -> str:
        head = "".join(f'<th scope="col"><button type="button">{escape(cell)}</button></th>' for cell in self.head)
        body = "\n".join(_row(row, len(self.head)) for row in self.rows)
        return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _row(row: Row, columns: int) -> str:
    first, *rest = map(escape, row.cells)
    first = first.replace("(", "(<wbr>")  # where a method's spelling may be cut into lines
    swatch = "" if row.slot is None else _swatch(row.slot)
    cells = f'<td><div class="method">{swatch}<span>{first}</span></div></td>'
    if row.failed:
        cells += f'<td class="why" colspan="{columns - 1}">{escape(row.failed)}</td>'
    values = row.values or [None] * len(rest)
    for text, value in zip(rest, values):
        kind = ' class="faint"' if text.startswith("(") else ""
        number = "" if value is None else f"{value:.6g}"
        sort = "" if row.values is None else f' data-v="{number}"'
        cells += f"<td{kind}{sort}>{text}</td>"
    known = "" if row.slot is None else f' data-run="{row.slot}"'
    kind = ' class="failed"' if row.failed else ""
    return f"<tr{known}{kind}>{cells}</tr>"


def _legend(shown: dict[int, tuple[str, str]], note: str) -> str:
    if not shown:
        return ""
    keys = "".join(
        f'<button type="button" class="s{slot}" data-run="{slot}" aria-pressed="false" title="{escape(name)}">'
        f"{_swatch(slot)}{escape(label)}</button>"
        for slot, (label, name) in shown.items()
    )
    shortened = any(label != name for label, name in shown.values())
    told = f'<p class="note">{escape(note)}</p>' if shortened else ""
    return f'<div class="legend" role="group" aria-label="methods: choose one to light it up">{keys}</div>{told}'


def _swatch(slot: int) -> str:
    dash = f' stroke-dasharray="{ink.dash(slot)}"' if ink.dash(slot) else ""
    return (
        f'<svg class="drawing swatch" width="30" height="12" aria-hidden="true"><g class="s{slot}">'
        f'<path class="line"{dash} d="M1 6H29"/>'
        f'<path class="mark" d="{ink.marker(ink.mark(slot), 15, 6, 3)}"/></g></svg>'
    )


def _section(section: Section) -> str:
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    inside = ""
    if section.wide:
        wide, narrow = section.wide
        caption = f"<figcaption>{escape(wide.title)}</figcaption>"
        both = f'<div class="wide">{wide.inline()}</div><div class="narrow">{narrow.inline()}</div>'
        inside = f"<figure>{caption}{both}</figure>"
    figures = "\n".join(
        f"<figure><figcaption>{escape(one.title)}</figcaption>{one.inline()}</figure>" for one in section.drawings
    )
    inside += f'<div class="grid">\n{figures}\n</div>' if figures else ""
    heading = f"<h2>{escape(section.heading)}</h2>" if section.heading else ""
    if section.folded:
        return f"<details><summary>{heading}</summary>{note}{inside}</details>"
    return f"<section>{heading}{note}{inside}</section>"


def _template(name: str) -> str:
    return files("thinwire.lab.pages").joinpath(name).read_text()
