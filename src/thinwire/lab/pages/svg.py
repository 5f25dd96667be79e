"""Charts as SVG, drawn by hand: small enough for a page of twenty, and the same file serves a page and a document.

    drawing = svg.lines("loss against steps", [Series("TopK(0.01)", steps, losses)], Axis("steps"), Axis("loss"))
    drawing.inline()                     # for a page that has ink.stylesheet() in its head
    drawing.write(Path("loss.svg"))      # by itself, with its style for day and night

`lines` draws curves with their names beside them, `front` points and the line that nothing beats, `heat_map` rows of
cells over time, `facets` several curves' charts on the same axes. `bars` is always on an even axis, since the length
of a bar on a logarithmic one says nothing; `dots` may be on either.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from thinwire.lab.pages import ink
from thinwire.lab.pages import pieces as p
from thinwire.lab.pages.pieces import LETTER, Box, Drawing, Series
from thinwire.lab.pages.scales import Axis, Scale


def lines(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    width: float = 440,
    height: float = 280,
    goal: tuple[float, str] | None = None,
) -> Drawing:
    """Curves, each with its name at its end; `goal` is a value of y and what it is called."""
    room = min(0.38 * width, 24 + LETTER * (2 + max((len(p.label(one)) for one in series), default=0)))
    box = Box(52, 26, width - room, height - 38)
    sx, sy = p.scales(series, x, y, box, goal)
    body = p.frame(box, sx, sy, x, y) + p.curves(series, box, sx, sy) + p.goal(goal, box, sy)
    return Drawing(title, width, height, body + p.names(series, box, sx, sy, room), tuple(series))


def facets(
    title: str,
    panels: Mapping[str, Sequence[Series]],
    x: Axis,
    y: Axis,
    *,
    columns: int = 3,
    width: float = 900,
    height: float = 170,
) -> Drawing:
    """Small charts on the same axes, one for each heading; `height` is that of one row of them."""
    every = [one for series in panels.values() for one in series]
    cell, body = width / columns, ""
    for place, (heading, series) in enumerate(panels.items()):
        left, top = cell * (place % columns), height * (place // columns)
        box = Box(left + 46, top + 26, left + cell - 8, top + height - 32)
        sx, sy = p.scales(every, x, y, box, None)
        last = place + columns >= len(panels)
        body += p.frame(box, sx, sy, x if last else Axis(log=x.log, spell=x.spell), y, heading)
        body += p.curves(series, box, sx, sy)
    rows = math.ceil(len(panels) / columns)
    return Drawing(title, width, height * rows, body, tuple(every))


def front(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    more_is_better: bool,
    width: float = 640,
    height: float = 400,
) -> Drawing:
    """Points, and a line through those that no other one beats in both: less of x, and a better y."""
    box = Box(56, 26, width - 16, height - 38)
    sx, sy = p.scales(series, x, y, box, None)
    best = unbeaten([point for one in series for point in one.points()], more_is_better)
    path = " ".join(f"{sx(px):.1f},{sy(py):.1f}" for px, py in best)
    body = p.frame(box, sx, sy, x, y) + f'<polyline class="axis" stroke-dasharray="2 3" points="{path}"/>'
    named: list[tuple[float, float, Series]] = []
    for one in series:
        marks = ""
        for (px, py), tip in zip(one.points(), one.tips or [one.name] * len(one.x)):
            marks += p.mark(one.slot, sx(px), sy(py), tip, 4.2)
            if (px, py) in best:
                named.append((sx(px), sy(py), one))
        body += p.group(one, marks)
    return Drawing(title, width, height, body + p.beside(named, box), tuple(series))


def unbeaten(points: Sequence[tuple[float, float]], more_is_better: bool) -> list[tuple[float, float]]:
    sign = 1 if more_is_better else -1
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not best or sign * y > sign * best[-1][1]:
            best.append((x, y))
    return best


def heat_map(
    title: str,
    rows: Mapping[str, Sequence[float | None]],
    x: Sequence[float],
    axis: Axis,
    values: Axis,
    *,
    width: float = 440,
    row: float = 18,
) -> Drawing:
    """A row of cells for each name, dark where there is much (bright at night), with its last value beside it."""
    left = min(0.4 * width, 12 + LETTER * max(map(len, rows), default=0))
    box = Box(left, 24, width - 52, 24 + row * len(rows))
    known = [v for cells in rows.values() for v in cells if v is not None and math.isfinite(v)]
    scale = Scale.over(known, values, 0, len(ink.HEAT))
    edges = [box.left + (box.right - box.left) * i / max(1, len(x)) for i in range(len(x) + 1)]
    body = p.text(0, 14, values.title, "soft")
    cells_at = [""] * len(ink.HEAT)  # one path for each colour
    for place, (name, cells) in enumerate(rows.items()):
        top = box.top + row * place
        body += p.text(box.left - 6, top + row - 5, p.cut(name, left), anchor="end")
        for first, last, level in p.runs([None if v is None else p.level(scale(v)) for v in cells]):
            wide = edges[last] - edges[first]
            cells_at[level] += f"M{edges[first]:.1f} {top:g}h{wide:.1f}v{row - 1:g}h{-wide:.1f}z"
        end = next((v for v in reversed(cells) if v is not None), None)
        if end is not None:
            body += p.text(box.right + 5, top + row - 5, values.spell(end), "tick")
    for place in sorted({0, len(x) // 2, len(x) - 1} if x else ()):
        anchor = "start" if place == 0 else "end" if place == len(x) - 1 else "middle"
        middle = (edges[place] + edges[place + 1]) / 2
        body += p.text(middle, box.bottom + 14, axis.spell(x[place]), "tick", anchor)
    body += "".join(f'<path class="h{level}" d="{path}"/>' for level, path in enumerate(cells_at) if path)
    body += p.text(box.right, box.bottom + 30, axis.title, "soft", "end")
    body += p.ramp(0, box.bottom + 20, values.spell(scale.low), values.spell(scale.high))
    return Drawing(title, width, box.bottom + 38, body)


def bars(
    title: str,
    rows: Sequence[tuple[Series, Mapping[str, float], bool]],
    parts: Sequence[str],
    unit: str,
    *,
    width: float = 440,
) -> Drawing:
    """Parts of a whole, end to end. A row: whose it is, its parts, and whether these are a guess."""
    scale = Scale(0.0, max((sum(values.values()) for _, values, _ in rows), default=0.0) or 1.0, 0, width - 8)
    body, at = "", 0.0
    for level, part in enumerate(parts):
        if not any(values.get(part) for _, values, _ in rows):
            continue
        body += f'<rect class="part{level}" x="{at:.0f}" y="2" width="11" height="11"/>'
        body += p.text(at + 16, 12, part, "soft")
        at += 30 + LETTER * len(part)
    for place, (one, values, guess) in enumerate(rows):
        top = 24.0 + 34 * place
        told = " + ".join(f"{values[part]:.3g}" for part in parts if values.get(part))
        inside = p.text(0, top + 11, p.cut(p.label(one), 0.6 * width), "name")
        inside += p.text(width, top + 11, f"{'about ' if guess else ''}{told} {unit}", "tick", "end")
        x = 0.0
        for level, part in enumerate(parts):
            wide = scale(values.get(part, 0.0))
            if wide:
                kind = f"part{level} guess" if guess else f"part{level}"
                inside += f'<rect class="{kind}" x="{x:.1f}" y="{top + 15:g}" width="{wide:.1f}" height="12"/>'
            x += wide
        body += p.group(one, inside)
    return Drawing(title, width, 28 + 34 * len(rows), body, tuple(one for one, _, _ in rows))


def dots(
    title: str, rows: Sequence[tuple[Series, Mapping[str, Sequence[float]]]], x: Axis, *, width: float = 440
) -> Drawing:
    """A line of marks for each row; what each kind of mark means is told above."""
    kinds = dict(zip(dict.fromkeys(kind for _, marks in rows for kind in marks), ("circle", "plus", "diamond")))
    box = Box(6, 22, width - 10, 26 + 30 * len(rows))
    scale = Scale.over([v for _, marks in rows for values in marks.values() for v in values], x, box.left, box.right)
    body, at = "", 0.0
    for kind, shape in kinds.items():
        body += f'<path class="{_dot(shape)} s0" d="{ink.marker(shape, at + 6, 9)}"/>'
        body += p.text(at + 15, 13, kind, "soft")
        at += 28 + LETTER * len(kind)
    for tick in scale.ticks(6):
        body += f'<path class="rule" d="M{scale(tick):.1f} {box.top}V{box.bottom}"/>'
        body += p.tick(scale(tick), box.bottom, x.spell(tick))
    for place, (one, marks) in enumerate(rows):
        middle = box.top + 22 + 30 * place
        inside = p.text(0, middle - 7, p.cut(p.label(one), 0.7 * width), "name")
        for kind, values in marks.items():
            for value in values:
                tip = f"<title>{escape(f'{one.name}: {x.spell(value)}, {kind}')}</title>"
                where = ink.marker(kinds[kind], scale(value), middle)
                inside += f'<path class="{_dot(kinds[kind])}" d="{where}">{tip}</path>'
        body += p.group(one, inside)
    body += p.text(box.right, box.bottom + 31, x.title, "soft", "end")
    return Drawing(title, width, box.bottom + 38, body, tuple(one for one, _ in rows))


def _dot(shape: str) -> str:
    return "mark" if shape == "circle" else "mark open"
