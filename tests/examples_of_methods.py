"""At least one instance of every method, by its shortest spelling: the laws run over all of them."""

from typing import Any

from thinwire import Reducer, parse

SPELLINGS = (
    "Dense()",
    "TopK(0.1)",
    "TopK(0.1, agree=True)",
    "TopK(1.0)",
    "RandomK(0.1)",
    "RandomK(0.1, agree=False)",
    "RandomK(0.1, agree=False, rescale=True)",
    "RandomBlock(0.1)",
    "RandomBlock(0.1, agree=False)",
    "RandomBlock(0.1, order='round_robin')",
    "RandomBlock(0.1, agree=False, order='round_robin', seed=7)",
    "RandomBlock(0.1, rescale=True)",
    "Threshold(1.5)",
    "Threshold(density=0.05, agree=True)",
    "DGC(0.1)",
    "DGC(0.1, nesterov=True, clip=1.0, agree=True)",
    "PowerSGD(1)",
    "PowerSGD()",
    "QSGD()",
    "QSGD(2, bucket=10, rounding='nearest')",
    "QSGD(8, norm='l2')",
    "SignSGD()",
    "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(TopK(0.1, agree=True), decay=0.9)",
    "ErrorFeedback(RandomBlock(0.1))",
    "ErrorFeedback(RandomK(0.1, agree=False))",
    "ErrorFeedback(PowerSGD(2))",
    "ErrorFeedback(QSGD(3, rounding='nearest'))",
    "ErrorFeedback(SignSGD())",
    "Momentum(ErrorFeedback(TopK(0.1)))",
    "Momentum(ErrorFeedback(RandomBlock(0.1)), nesterov=True, masking=False)",
    "Adam(ErrorFeedback(TopK(0.1)))",
    "Warmup(ErrorFeedback(TopK(0.1)), steps=2)",
    "Warmup(DGC(0.1), steps=3, densities=(1.0, 0.5, 0.2))",
    "Warmup(Momentum(ErrorFeedback(PowerSGD(1))), steps=2)",
    "Route(ErrorFeedback(TopK(0.1)))",
    "ErrorFeedback(Route(TopK(0.1), rest=QSGD(), smallest=40))",
    "Cast(ErrorFeedback(TopK(0.1)))",
    "ErrorFeedback(Cast(PowerSGD(1), dtype='float16'))",
)
EXAMPLES: dict[str, Reducer[Any, Any]] = {spelling: parse(spelling) for spelling in SPELLINGS}
