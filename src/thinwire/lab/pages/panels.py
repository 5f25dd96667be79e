"""Charts for documents: points with lines to compare them to, and several charts in one picture."""

from collections.abc import Sequence

from thinwire.lab.pages import pieces as p
from thinwire.lab.pages.pieces import LETTER, Box, Drawing, Series
from thinwire.lab.pages.scales import Axis

GAP, HEAD = 18.0, 24.0  # between charts, and above each for its title
ROW, BOLD = 17.0, 1.12  # of a legend; its letters are wider than others
Level = tuple[float, str]  # a value of y, and what it is called


def scatter(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    levels: Sequence[Level] = (),
    joined: bool = False,
    legend: bool = True,
    width: float = 440,
    height: float = 280,
) -> Drawing:
    """Points by kind. `levels` are lines across, `joined` draws a line through each kind's points."""
    rows = _legend_rows(series, width) if legend else []
    top = 30.0 + ROW * len(rows)
    box = Box(52, top, width - 14, height - 38)
    also = Series("", [], [value for value, _ in levels])
    sx, sy = p.scales(series, x, y, box, None)
    if levels:
        known = [py for one in series for _, py in one.points()]
        sy = sy.over([*known, *(value for value in also.y)], y, box.bottom, box.top)
    body = p.frame(box, sx, sy, x, y)
    body += "".join(p.level_line(value, box, sy, place) for place, (value, _) in enumerate(levels))
    if joined:
        body += p.curves([_bare(one) for one in series], box, sx, sy)
    named: list[tuple[float, float, Series]] = []
    for one in series:
        tips = one.tips or [one.name] * len(one.x)
        known_tips = [tip for value, tip in zip(one.y, tips) if value is not None]
        places = [(sx(px), sy(py)) for px, py in one.points()]
        body += p.group(one, "".join(p.mark(one.slot, *at, tip, 4.0) for at, tip in zip(places, known_tips)))
        named += [(*places[0], one)] if places and not legend else []
    body += p.beside(named, box)
    body += "".join(p.level_name(value, said, box, sy, place) for place, (value, said) in enumerate(levels))
    for row, entries in enumerate(rows):
        for at, one in entries:
            key = p.mark(one.slot, at + 5, 8 + ROW * row, "", 4.0)
            body += p.group(one, key + p.text(at + 14, 12 + ROW * row, p.label(one), "name"))
    return Drawing(title, width, height, body, tuple(series))


def _legend_rows(series: Sequence[Series], width: float) -> list[list[tuple[float, Series]]]:
    """What each kind of mark means, in as many rows as it takes; the title of y stands above them."""
    rows: list[list[tuple[float, Series]]] = [[]]
    at = 4.0
    for one in series:
        wide = 30 + BOLD * LETTER * len(p.label(one))
        if rows[-1] and at + wide > width:
            rows.append([])
            at = 4.0
        rows[-1].append((at, one))
        at += wide
    return rows


def _bare(one: Series) -> Series:
    """A line without marks of its own, which are drawn larger."""
    order = sorted((px, py) for px, py in one.points())
    return Series(one.name, [px for px, _ in order], [py for _, py in order], one.slot, one.label)


def together(title: str, drawings: Sequence[Drawing], columns: int = 2) -> Drawing:
    """Several charts in one picture, each with its title above it."""
    wide = max(one.width for one in drawings)
    body, top, every = "", 0.0, []
    for begin in range(0, len(drawings), columns):
        row = drawings[begin : begin + columns]
        for place, one in enumerate(row):
            left = place * (wide + GAP)
            body += p.text(left, top + 14, p.cut(one.title, wide), "head")
            window = f'x="{left:g}" y="{top + HEAD:g}" width="{one.width:g}" height="{one.height:g}"'
            body += f'<svg {window} viewBox="0 0 {one.width:g} {one.height:g}">{one.body}</svg>'
            every += list(one.series)
        top += HEAD + max(one.height for one in row) + GAP
    across = min(columns, len(drawings))
    return Drawing(title, across * wide + (across - 1) * GAP, top - GAP, body, tuple(every))
