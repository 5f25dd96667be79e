"""Writes the table of docs/between-sites.md and docs/images/sites.svg from docs/studies/sites.json, which
`thinwire study sites --out docs/studies` makes: python docs/make_sites.py
"""

from pathlib import Path

from thinwire.lab.studies import sites

DOCS = Path(__file__).parent
BEGIN, END = "<!-- made by docs/make_sites.py -->\n", "<!-- end -->\n"


def page() -> str:
    """The page with its table made anew."""
    head, _, rest = (DOCS / "between-sites.md").read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + sites.table(sites.read(DOCS / "studies" / "sites.json")) + END + tail


if __name__ == "__main__":
    (DOCS / "between-sites.md").write_text(page())
    sites.picture(sites.read(DOCS / "studies" / "sites.json")).write(DOCS / "images" / "sites.svg")
