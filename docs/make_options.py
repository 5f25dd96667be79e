"""Writes the table of a run's settings into lab.md, from the place where they stand: `python docs/make_options.py`."""

from pathlib import Path

from thinwire.lab.records.run import table

BEGIN, END = "<!-- settings: made by docs/make_options.py -->\n", "<!-- end of settings -->\n"
PAGE = Path(__file__).parent / "lab.md"


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
