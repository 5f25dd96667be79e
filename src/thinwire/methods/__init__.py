"""One paper, one file. To add a method: write its file, and one line here."""

from typing import Any

from thinwire.methods.dense import Dense
from thinwire.methods.top_k import TopK
from thinwire.reducer import Reducer

METHODS: dict[str, type[Reducer[Any, Any]]] = {
    "Dense": Dense,
    "TopK": TopK,
}
