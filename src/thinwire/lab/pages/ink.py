"""Colours, dashes and marks. Each drawing names them by class, and one stylesheet says what they are by day and night.

A slot is a method's place in the palette, the same in all drawings of a page. Slot 0 is grey: what others are compared
to. Every other slot has a colour of its own; its dash and its mark also tell it apart in black and white.
"""

import colorsys

# By day and by night, each readable on its paper (tests/lab/test_svg.py holds the contrast), neighbours far apart.
COLOURS = (
    ("#6b7280", "#a3abb8"),
    ("#0069a8", "#5cb8f0"),
    ("#c24e00", "#ff9a52"),
    ("#007a58", "#35cf9d"),
    ("#8342bd", "#c9a2f5"),
    ("#b8336f", "#f58fbd"),
    ("#8a6100", "#e3b32c"),
    ("#0b7680", "#55d3db"),
    ("#7a4a2b", "#d3a585"),
    ("#b3202c", "#ff8585"),
    ("#5c6c00", "#b9cc4a"),
    ("#2b3f9e", "#9caeff"),
    ("#36751c", "#8cd966"),
)
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "14 3")
MARKS = ("circle", "square", "diamond", "triangle", "cross", "plus", "wedge")
DAY = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#57606a",
    "rule": "#d7dce2",
    "panel": "#f5f7f9",
    "accent": "#0069a8",
    "part0": "#cfd5dc",
    "part1": "#8794a3",
    "part2": "#3d4854",
    "part3": "#e4d3ad",
}
NIGHT = {
    "paper": "#14181d",
    "ink": "#e8ecf1",
    "soft": "#a2acb8",
    "rule": "#353d47",
    "panel": "#1d232a",
    "accent": "#5cb8f0",
    "part0": "#3b4552",
    "part1": "#71808f",
    "part2": "#c3ced9",
    "part3": "#6d5f3c",
}
HEAT = ("#eef4fa", "#d3e4f3", "#aed0ea", "#83b6dd", "#579acb", "#357db4", "#1d6097", "#0d4576", "#052b50")


def colour(slot: int) -> tuple[str, str]:
    """A colour by day and by night; after the chosen ones, hues a golden angle apart."""
    if slot < len(COLOURS):
        return COLOURS[slot]
    hue = (slot * 0.381966) % 1.0
    strength = 0.55 + 0.3 * (slot % 3) / 2
    day, night = (colorsys.hls_to_rgb(hue, light, strength) for light in (0.27, 0.72))
    return _hex(day), _hex(night)


def dash(slot: int) -> str:
    return DASHES[slot % len(DASHES)]


def mark(slot: int) -> str:
    return MARKS[slot % len(MARKS)]


def marker(shape: str, x: float, y: float, r: float = 3.4) -> str:
    """The path of a mark around a place."""
    at = f"M{x:.1f} {y:.1f}"
    if shape == "circle":
        return f"{at}m{-r:.1f} 0a{r} {r} 0 1 0 {2 * r:.1f} 0a{r} {r} 0 1 0 {-2 * r:.1f} 0z"
    if shape == "square":
        return f"{at}m{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}z"
    if shape == "diamond":
        d = 1.35 * r
        return f"{at}m0 {-d:.1f}l{d:.1f} {d:.1f}l{-d:.1f} {d:.1f}l{-d:.1f} {-d:.1f}z"
    if shape == "triangle":
        return f"{at}m0 {-1.2 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}z"
    if shape == "wedge":
        return f"{at}m0 {1.2 * r:.1f}l{1.2 * r:.1f} {-2.1 * r:.1f}h{-2.4 * r:.1f}z"
    a, b = (r, r) if shape == "cross" else (1.3 * r, 0.0)
    c, d = (r, -r) if shape == "cross" else (0.0, 1.3 * r)
    return f"M{x - a:.1f} {y - b:.1f}L{x + a:.1f} {y + b:.1f}M{x - c:.1f} {y - d:.1f}L{x + c:.1f} {y + d:.1f}"


def stylesheet(slots: int) -> str:
    """The style of all drawings: variables for day and night, then what each class looks like. Paper prints by day."""
    return (
        f":root{{color-scheme:light dark;{_variables(0, slots)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(1, slots)}}}}}"
        + "".join(f".s{slot}{{--c:var(--s{slot})}}" for slot in range(slots))
        + "".join(f".h{level}{{fill:var(--h{level})}}" for level in range(len(HEAT)))
        + RULES
    )


def _variables(night: int, slots: int) -> str:
    heat = HEAT[::-1] if night else HEAT
    named = {**(NIGHT if night else DAY), **{f"s{slot}": colour(slot)[night] for slot in range(slots)}}
    named |= {f"h{level}": value for level, value in enumerate(heat)}
    return "".join(f"--{name}:{value};" for name, value in named.items())


RULES = """
.drawing{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink)}
.drawing text{fill:var(--ink)}
.drawing .soft,.drawing .tick{fill:var(--soft)}
.drawing .tick{font-size:11px}
.drawing .head{font-weight:600}
.drawing .paper{fill:var(--paper)}
.drawing .rule{stroke:var(--rule);stroke-width:1;fill:none}
.drawing .axis{stroke:var(--soft);stroke-width:1;fill:none}
.drawing .line{stroke:var(--c);stroke-width:1.9;fill:none;stroke-linejoin:round}
.drawing .s0 .line{stroke-width:2.6}
.drawing .mark{fill:var(--c);stroke:var(--c);stroke-width:1.4}
.drawing .open{fill:var(--paper)}
.drawing .leader{stroke:var(--c);stroke-width:.8;fill:none;opacity:.65}
.drawing .name{fill:var(--c);font-size:11.5px;font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.drawing .over{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.drawing .level{stroke:var(--soft);stroke-width:1.4;fill:none}
.drawing .goal{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:1 3;stroke-linecap:round;fill:none}
.drawing .part0{fill:var(--part0)}.drawing .part1{fill:var(--part1)}.drawing .part2{fill:var(--part2)}
.drawing .part3{fill:var(--part3)}
.drawing .guess{fill-opacity:.45;stroke:var(--part2);stroke-width:1;stroke-dasharray:3 2}
"""


def _hex(rgb: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
