"""Which picture a study has."""

from collections.abc import Callable, Sequence

from thinwire.lab.papers import frontier, ranks, sparse, sparsifiers, variance
from thinwire.lab.papers.picture import Picture as Picture
from thinwire.lab.studies.kept import File

PICTURES: dict[str, Callable[[Sequence[File]], Picture]] = {
    "sparse": sparse.draw,
    "variance": variance.draw,
    "rank": ranks.draw,
    "exdyna": sparsifiers.draw,
    "frontier": frontier.draw,
}


def picture(files: Sequence[File]) -> Picture:
    """Of all files together: one study, made in one command or in several."""
    return PICTURES[files[0].study](files)
