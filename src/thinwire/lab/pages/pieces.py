"""What charts are made of: a drawing and its series, axes, curves, marks, and names that do not run into each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from thinwire.lab.pages import ink
from thinwire.lab.pages.scales import Axis, Scale, spread
from thinwire.lab.records.files import write_text

LETTER = 6.9  # the width of a character of a name, on the safe side
MARKS_A_LINE = 7  # more would hide the line


@dataclass(frozen=True)
class Series:
    """Points of one method. `label` stands beside them, `tips` are told for each point under the pointer."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    slot: int = 1
    label: str = ""
    tips: Sequence[str] = ()

    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y) if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Drawing:
    title: str
    width: float
    height: float
    body: str
    series: Sequence[Series] = field(default=())  # what was drawn, for whoever wants to check

    def inline(self) -> str:
        """For a page that has the stylesheet already."""
        return f'<svg class="drawing" role="img" aria-label="{escape(self.title)}" {self._box()}>{self.body}</svg>'

    def standalone(self) -> str:
        """A file of its own, which follows the reader's light or dark mode."""
        slots = max((one.slot for one in self.series), default=1) + 1
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" {self._box()}>'
            f"<title>{escape(self.title)}</title><style>{escape(ink.stylesheet(slots), quote=False)}</style>"
            f'<rect class="paper" width="{self.width:g}" height="{self.height:g}"/>{self.body}</svg>\n'
        )

    def write(self, path: Path) -> None:
        write_text(path, self.standalone())

    def _box(self) -> str:
        return f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'


@dataclass(frozen=True)
class Box:
    """The inside of a chart, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def label(one: Series) -> str:
    return one.label or one.name


def cut(said: str, room: float) -> str:
    """As much of a text as there is room for."""
    most = max(4, int(room / LETTER))
    return said if len(said) <= most else f"{said[: most - 1]}…"


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "") -> str:
    style = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text{style} x="{x:.1f}" y="{y:.1f}">{escape(said)}</text>'


def group(one: Series, inside: str) -> str:
    """What belongs to one method, so that a page can light it up."""
    return f'<g class="s{one.slot}" data-run="{one.slot}">{inside}</g>'


def scales(series: Sequence[Series], x: Axis, y: Axis, box: Box, goal: tuple[float, str] | None) -> tuple[Scale, Scale]:
    points = [point for one in series for point in one.points()]
    also = [goal[0]] if goal else []
    return (
        Scale.over([px for px, _ in points], x, box.left, box.right),
        Scale.over([*(py for _, py in points), *also], y, box.bottom, box.top),
    )


def frame(box: Box, sx: Scale, sy: Scale, x: Axis, y: Axis, heading: str = "") -> str:
    """Axes with ticks; the title of y, or a heading, above, where it can be read without turning one's head."""
    drawn = ""
    for value in sy.ticks(max(3, int((box.bottom - box.top) / 40))):
        at = sy(value)
        drawn += f'<path class="rule" d="M{box.left:.1f} {at:.1f}H{box.right:.1f}"/>'
        drawn += text(box.left - 6, at + 4, y.spell(value), "tick", "end")
    drawn += f'<path class="axis" d="M{box.left:.1f} {box.bottom:.1f}H{box.right:.1f}"/>'
    for value in x.at or sx.ticks(max(2, int((box.right - box.left) / 58))):
        drawn += f'<path class="axis" d="M{sx(value):.1f} {box.bottom:.1f}v4"/>' + tick(
            sx(value), box.bottom, x.spell(value)
        )
    above = text(box.left - 46, box.top - 12, heading or y.title, "head" if heading else "soft")
    return drawn + above + text(box.right, box.bottom + 31, x.title, "soft", "end")


def tick(x: float, bottom: float, said: str) -> str:
    return text(x, bottom + 16, said, "tick", "middle")


def goal(told: tuple[float, str] | None, box: Box, sy: Scale) -> str:
    if told is None or not sy.holds(told[0]):
        return ""
    at = sy(told[0])
    line = f'<path class="goal" d="M{box.left:.1f} {at:.1f}H{box.right:.1f}"/>'
    return line + text(box.left + 4, at - 5, told[1], "tick over")


def level_line(value: float, box: Box, sy: Scale, place: int = 0) -> str:
    """A line across for something that others are compared to."""
    kind = ("", "6 3", "2 3", "9 3 2 3")[place % 4]
    dash = f' stroke-dasharray="{kind}"' if kind else ""
    return f'<path class="level"{dash} d="M{box.left:.1f} {sy(value):.1f}H{box.right:.1f}"/>' if sy.holds(value) else ""


def level_name(value: float, said: str, box: Box, sy: Scale, place: int = 0) -> str:
    """What the line is called; names of neighbours stand at different places, and above all that is drawn."""
    middle = (box.left + box.right) / 2
    anchor, x = (("end", box.right - 4), ("start", box.left + 4), ("middle", middle))[place % 3]
    return text(x, sy(value) - 4, said, "tick over", anchor) if sy.holds(value) else ""


def curves(series: Sequence[Series], box: Box, sx: Scale, sy: Scale) -> str:
    """The lines with some marks on them, cut off at the edges of the plot; grey first, so that it lies below."""
    left, top = box.left - 5, box.top - 5
    wide, high = box.right - box.left + 10, box.bottom - box.top + 10
    drawn = ""
    for one in sorted(series, key=lambda one: one.slot != 0):
        path, pen = "", "M"
        for px, py in zip(one.x, one.y):
            if py is None or not math.isfinite(py) or (sx.log and px <= 0) or (sy.log and py <= 0):
                pen = "M"
                continue
            path += f"{pen}{sx(px):.1f} {sy(py):.1f}"
            pen = "L"
        dash = f' stroke-dasharray="{ink.dash(one.slot)}"' if ink.dash(one.slot) else ""
        drawn += group(one, f'<path class="line"{dash} d="{path}"/>' + _marks(one, sx, sy))
    window = f'x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<svg {window} viewBox="{left:.1f} {top:.1f} {wide:.1f} {high:.1f}">{drawn}</svg>'


def _marks(one: Series, sx: Scale, sy: Scale) -> str:
    """All points where they have something to tell, else a few: enough to know the line without its colour."""
    seen = [
        (i, px, py) for i, (px, py) in enumerate(zip(one.x, one.y)) if py is not None and sx.holds(px) and sy.holds(py)
    ]
    if one.tips:
        return "".join(mark(one.slot, sx(px), sy(py), one.tips[i], 2.6) for i, px, py in seen)
    stride = math.ceil(len(seen) / MARKS_A_LINE) or 1
    few = seen[(one.slot % stride) if len(seen) > stride else 0 :: stride]
    together = "".join(ink.marker(ink.mark(one.slot), sx(px), sy(py), 2.6) for _, px, py in few)
    return f'<path class="mark" d="{together}"/>' if together else ""


def mark(slot: int, x: float, y: float, tip: str, r: float) -> str:
    told = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<path class="mark" d="{ink.marker(ink.mark(slot), x, y, r)}">{told}</path>'


def names(series: Sequence[Series], box: Box, sx: Scale, sy: Scale, room: float) -> str:
    """Each name where its line ends, in columns: right of the plot, or inside it behind lines that end early."""
    ends = []
    for one in series:
        points = [(px, py) for px, py in one.points() if px > 0 or not sx.log]
        if points:
            x, y = sx(points[-1][0]), sy(points[-1][1])
            ends.append((min(box.right, max(box.left, x)), min(box.bottom, max(box.top, y)), y, one))
    return "".join(_column(column, at, box, room) for at, column in _columns(ends, box, room))


End = tuple[float, float, float, Series]  # x, y inside the plot, y, and whose end it is


def _columns(ends: Sequence[End], box: Box, room: float) -> list[tuple[float, list[End]]]:
    """Ends near one another share a column behind the last of them; what would run out of the plot goes beside it."""
    found: list[list[End]] = []
    for end in sorted(ends, key=lambda end: end[0]):
        if found and end[0] - found[-1][-1][0] < room:
            found[-1].append(end)
        else:
            found.append([end])
    return [
        (min(box.right, column[-1][0]) if column[-1][0] + room < box.right else box.right, column) for column in found
    ]


def _column(ends: Sequence[End], at: float, box: Box, room: float) -> str:
    drawn = ""
    for (x, y, real, one), place in zip(ends, spread([end[1] for end in ends], 14, box.top, box.bottom)):
        leader = f"M{x:.1f} {y:.1f}L{at + 5:.1f} {place:.1f}"
        arrow = "" if real == y else "↓ " if real > y else "↑ "
        name = text(at + 8, place + 4, cut(arrow + label(one), room - 8), "name")
        drawn += group(one, f'<title>{escape(one.name)}</title><path class="leader" d="{leader}"/>{name}')
    return drawn


def beside(points: Sequence[tuple[float, float, Series]], box: Box) -> str:
    """Names of points: right of them, or left, above, below; one that finds no room is told under the pointer alone."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in points]
    drawn = ""
    for x, y, one in points:
        wide = LETTER * len(label(one))
        for anchor, dx, dy in (("start", 9, 4), ("end", -9, 4), ("middle", 0, -10), ("middle", 0, 17)):
            left = x + dx - {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
            place = (left, y + dy - 10, left + wide, y + dy + 2)
            inside = (
                box.left <= place[0]
                and place[2] <= box.right + 12
                and box.top - 12 <= place[1]
                and place[3] <= box.bottom
            )
            mine = (x - 6, y - 6, x + 6, y + 6)
            if inside and not any(_overlap(place, other) for other in taken if other != mine):
                taken.append(place)
                drawn += group(one, text(x + dx, y + dy, label(one), "name", anchor))
                break
    return drawn


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def level(place: float) -> int:
    return min(len(ink.HEAT) - 1, max(0, int(place)))


def runs(levels: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """First, after last, and level of each stretch of cells that look alike; those that are not known are left out."""
    first = 0
    for place in range(1, len(levels) + 1):
        if place == len(levels) or levels[place] != levels[first]:
            at = levels[first]
            if at is not None:
                yield first, place, at
            first = place


def ramp(x: float, y: float, low: str, high: str) -> str:
    """What the colours of a heat map mean."""
    start = x + LETTER * len(low) + 6
    cells = "".join(
        f'<rect class="h{i}" x="{start + 11 * i:.1f}" y="{y:.1f}" width="11" height="10"/>'
        for i in range(len(ink.HEAT))
    )
    return text(x, y + 9, low, "tick") + cells + text(start + 11 * len(ink.HEAT) + 5, y + 9, high, "tick")
