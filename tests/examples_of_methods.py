"""At least one instance of every method, by its spelling: the laws run over all of them."""

from typing import Any

from thinwire import Dense, ErrorFeedback, Reducer, TopK

EXAMPLES: dict[str, Reducer[Any, Any]] = {
    "Dense()": Dense(),
    "TopK(0.1)": TopK(0.1),
    "TopK(0.1, agree=True)": TopK(0.1, agree=True),
    "TopK(1.0)": TopK(1.0),
    "ErrorFeedback(TopK(0.1))": ErrorFeedback(TopK(0.1)),
    "ErrorFeedback(TopK(0.1, agree=True), decay=0.9)": ErrorFeedback(TopK(0.1, agree=True), decay=0.9),
}
