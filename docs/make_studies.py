"""Makes the tables, figures and claims of all pages from docs/studies/*.json: python docs/make_studies.py"""

from pathlib import Path

from thinwire.lab.papers.documents import make

if __name__ == "__main__":
    for path in make(Path(__file__).parent):
        print(path)
