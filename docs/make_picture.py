"""Draws docs/images/steps.svg from the table of results in README.md: python docs/make_picture.py"""

import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "steps.svg"
LEFT, WIDTH, ROW, TOP = 280, 730, 30, 58


def rows() -> list[tuple[str, float, str]]:
    """Method, seconds a step and megabytes a step, of every row of the README's results that has both."""
    results = (ROOT / "README.md").read_text().partition("## Results")[2]
    found = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|", results, re.MULTILINE)
    return [(name.replace("`", ""), float(seconds), size) for name, seconds, size in found]


def picture() -> str:
    bars, told = rows(), []
    scale = (WIDTH - LEFT - 150) / max(seconds for _, seconds, _ in bars)
    height = TOP + ROW * len(bars) + 10
    for i, (name, seconds, size) in enumerate(bars):
        y, length = TOP + ROW * i, seconds * scale
        colour = "#90a4ae" if "DDP" in name else "#00796b"
        told += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="20" fill="{colour}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 15}">{seconds:.2f} s, {size} MB</text>',
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            'font-size="13" fill="#263238">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            '<text x="12" y="22" font-size="15" font-weight="bold">Seconds a step, and megabytes on a link</text>',
            '<text x="12" y="42">10M-parameter GPT, AdamW, four workers behind emulated links of 100 Mbit/s</text>',
            *told,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
