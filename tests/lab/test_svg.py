"""Drawings: every point is where its value says, names do not run into each other, colours can be told apart."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.pages import ink, svg
from thinwire.lab.pages.pieces import Drawing, Series
from thinwire.lab.pages.scales import Axis, Scale, in_bytes, percent, plain, spread

NAME = "{http://www.w3.org/2000/svg}"


def parsed(drawing: Drawing) -> ET.Element:
    return ET.fromstring(drawing.standalone())


def of_class(root: ET.Element, kind: str) -> list[ET.Element]:
    return [one for one in root.iter() if kind in (one.get("class") or "").split()]


def places(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


def ticks(root: ET.Element, anchor: str) -> dict[float, float]:
    """Where the ticks of an axis are, by what they say: those of x are in the middle of their texts."""
    at = "x" if anchor == "middle" else "y"
    found = [one for one in of_class(root, "tick") if one.get("text-anchor") == anchor]
    return {float((one.text or "").replace(" ", "")): float(one.get(at) or "nan") for one in found}


@pytest.mark.parametrize("log", [False, True])
def test_points_are_where_the_ticks_say(log: bool) -> None:
    x, y = [1.0, 10.0, 1000.0], [2.0, None, 0.5]
    root = parsed(svg.lines("a", [Series("a", x, y)], Axis("steps", log=log), Axis("loss")))
    (line,) = of_class(root, "line")
    drawn = places(line.get("d") or "")
    assert len(drawn) == 2 and (line.get("d") or "").count("M") == 2  # a gap where nothing is known
    for axis, at in (("middle", 0), ("end", 1)):
        known = sorted(ticks(root, axis).items())
        (a, pa), (b, pb) = known[0], known[-1]
        for value, place in zip(((1.0, 2.0), (1000.0, 0.5)), drawn):
            share = (value[at] - a) / (b - a)
            if log and at == 0:
                share = math.log(value[at] / a) / math.log(b / a)
            shift = 4 if axis == "end" else 0  # a text's foot lies below its tick
            assert place[at] == pytest.approx(pa + share * (pb - pa) - shift, abs=0.5)


@given(st.floats(1e-6, 1e9), st.floats(1.001, 1e8), st.booleans(), st.integers(2, 12))
def test_ticks_lie_inside_in_order_and_are_not_too_many(low: float, factor: float, log: bool, most: int) -> None:
    scale = Scale(low, low * factor, 0, 100, log)
    found = scale.ticks(most)
    assert found == sorted(set(found)) and all(scale.holds(tick) for tick in found) and len(found) <= most + 1


@given(st.lists(st.floats(-50, 350), min_size=1, max_size=30))
def test_names_keep_their_distance(wanted: list[float]) -> None:
    found = spread(wanted, 14, 0, 300)
    gap = min(14, 300 / max(1, len(wanted) - 1))
    assert all(b - a >= gap - 1e-6 for a, b in zip(sorted(found), sorted(found)[1:]))
    assert min(found) >= -1e-6 and max(found) <= 300 + 1e-6
    assert [w for _, w in sorted(zip(found, wanted))] == sorted(wanted)


def test_an_end_that_lies_outside_is_marked_with_an_arrow() -> None:
    series = [Series("near", [1, 2], [0.5, 0.9], 1), Series("far", [1, 2], [0.1, 0.2], 2)]
    root = parsed(svg.lines("a", series, Axis(), Axis(low=0.8, high=1.0)))
    assert [one.text for one in of_class(root, "name")] == ["near", "↓ far"]


def test_the_front_is_what_nothing_beats() -> None:
    points = [(100.0, 0.9), (10.0, 0.8), (50.0, 0.7), (5.0, 0.5)]
    assert svg.unbeaten(points, True) == [(5.0, 0.5), (10.0, 0.8), (100.0, 0.9)]
    assert svg.unbeaten([(100.0, 2.0), (10.0, 2.5), (50.0, 2.6)], False) == [(10.0, 2.5), (100.0, 2.0)]
    series = [Series(str(i), [x], [y], i) for i, (x, y) in enumerate(points)]
    root = parsed(svg.front("a", series, Axis(log=True, spell=in_bytes), Axis(spell=percent), more_is_better=True))
    (line,) = root.iter(f"{NAME}polyline")
    assert len((line.get("points") or "").split()) == 3
    assert {one.text for one in of_class(root, "name")} == {"0", "1", "3"} and len(of_class(root, "mark")) == 4


def test_a_heat_map_has_a_cell_for_each_value_and_holes_for_none() -> None:
    rows = {"first": [1.0, 1.0, 9.0], "second": [None, 5.0, 9.0]}
    root = parsed(svg.heat_map("rank", rows, [10, 20, 30], Axis("steps"), Axis("rank")))
    cells = {level: one.get("d") or "" for level in range(9) for one in of_class(root, f"h{level}") if one.get("d")}
    widths = {level: [float(w) for w in re.findall(r"h([\d.]+)v", path)] for level, path in cells.items()}
    whole = sum(w for each in widths.values() for w in each)
    assert sorted(widths) == [0, 4, 8] and len(widths[0]) == 1 and len(widths[8]) == 2
    assert widths[0][0] == pytest.approx(2 * whole / 5, abs=0.2)  # two cells alike are one piece


def test_facets_share_their_axes() -> None:
    panels = {str(i): [Series("a", [1, 2], [0.0, float(i)])] for i in range(1, 5)}
    drawing = svg.facets("a", panels, Axis("x"), Axis("y"), columns=2, width=600, height=150)
    root = parsed(drawing)
    heights = []
    for line in of_class(root, "line"):
        (_, low), (_, high) = places(line.get("d") or "")
        heights.append(low - high)
    assert heights == [pytest.approx(heights[0] * i, abs=0.3) for i in range(1, 5)] and drawing.height == 300


def test_bars_are_as_long_as_their_values_say() -> None:
    rows = [(Series("a", (), ()), {"x": 1.0, "z": 3.0}, False), (Series("b", (), ()), {"x": 2.0}, True)]
    root = parsed(svg.bars("a", rows, ("x", "y", "z"), "ms"))
    drawn = [one for one in root.iter(f"{NAME}rect") if one.get("height") == "12"]
    lengths = [float(one.get("width") or 0) for one in drawn]
    assert lengths == [pytest.approx(lengths[0] * i, abs=0.2) for i in (1, 3, 2)]
    assert [one.get("class") for one in drawn] == ["part0", "part2", "part0 guess"]


def test_text_is_escaped_and_a_file_stands_alone(tmp_path: Path) -> None:
    bad = '<!--<script>"&'
    for drawing in (
        svg.lines(bad, [Series(bad, [1, 2], [1, 2], 1, bad, [bad, bad])], Axis(bad), Axis(bad), goal=(1.5, bad)),
        svg.front(bad, [Series(bad, [1], [1], 1, bad, [bad])], Axis(bad), Axis(bad), more_is_better=True),
        svg.heat_map(bad, {bad: [1.0]}, [1], Axis(bad), Axis(bad)),
        svg.dots(bad, [(Series(bad, (), ()), {bad: [1.0]})], Axis(bad)),
        svg.bars(bad, [(Series(bad, (), ()), {bad: 1.0}, False)], [bad], bad),
        svg.facets(bad, {bad: [Series(bad, [1], [1])]}, Axis(bad), Axis(bad)),
    ):
        drawing.write(tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        assert "<!--" not in text and "<script" not in text and "<script" not in drawing.inline()
        root = ET.fromstring(text)
        (style,) = root.iter(f"{NAME}style")
        assert "prefers-color-scheme:dark" in (style.text or "") and root.findtext(f"{NAME}title") == bad


def test_nothing_to_draw_is_drawn_as_nothing() -> None:
    for drawing in (
        svg.lines("a", [], Axis(log=True), Axis(log=True)),
        svg.lines("a", [Series("a", [1], [None])], Axis(log=True), Axis()),
        svg.front("a", [], Axis(), Axis(), more_is_better=True),
        svg.heat_map("a", {}, [], Axis(), Axis()),
        svg.bars("a", [], ["x"], "ms"),
        svg.dots("a", [], Axis(log=True)),
        svg.facets("a", {}, Axis(), Axis()),
    ):
        parsed(drawing)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_method_has_a_style_of_its_own_that_can_be_read() -> None:
    assert len({ink.colour(slot) for slot in range(60)}) == 60
    assert len({(ink.dash(slot), ink.mark(slot)) for slot in range(35)}) == 35  # without colours
    for paper, night in ((ink.DAY["paper"], 0), (ink.NIGHT["paper"], 1)):
        for slot in range(60):
            light, dark = sorted((luminance(paper), luminance(ink.colour(slot)[night])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (slot, ink.colour(slot)[night])


def test_numbers_are_short() -> None:
    assert [plain(v) for v in (0.025, 12.0, 3000.0, 2e7, 0.0)] == ["0.025", "12", "3 000", "2e+07", "0"]
    assert [in_bytes(v) for v in (3.0, 1500.0, 2e6, 3e9)] == ["3 B", "1.5 kB", "2 MB", "3 GB"]
