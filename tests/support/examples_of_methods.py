"""At least one instance of every method, by its shortest spelling: the laws run over all of them, in threads.

A capture knows of a method only what it wants, what it remembers and which collectives it issues. So what is asked of a
capture in real processes is asked with representatives, one of each kind; `pytest --all` takes every method.
"""

import os
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
    "PowerSGD(4)",
    "QSGD(4)",
    "QSGD(2, bucket=10, rounding='nearest')",
    "QSGD(8, norm='l2')",
    "QSGD(4, bucket=64, two_way=True)",
    "SignSGD()",
    "SignSGD(two_way=True)",
    "LowBit(2)",
    "LowBit(1, block=64, smallest=0)",
    "LowBit(1.6, block=100, smallest=0)",
    "LowBit(3, block=64, two_way=False, smallest=0)",
    "LowBit(8, block=64, smallest=0)",
    "ErrorFeedback(LowBit(2, block=64, smallest=0))",
    "DeMo(4, chunk=8)",
    "DeMo(2, chunk=16, sign=False)",
    "SparseLoCo(4, chunk=8)",
    "SparseLoCo(2, chunk=16, decay=1.0, bits=4)",
    "DAD()",
    "DAD(bits=8, skip_zeros=True)",
    "EDAD()",
    "RankDAD(2)",
    "RankDAD(2, feedback=False)",
    "RankDAD(2, basis='own', energy=0.8)",
    "RankDAD(2, basis='shared', energy=0.8)",
    "RankDAD(2, basis='own', bits=4)",
    "AutoDAD()",
    "AutoDAD(bits=16)",
    "AutoDAD(exact=False, rank=2)",
    "PublishedRankDAD(3)",
    "Variance(2.0)",
    "Variance(1.0, quantise=False)",
    "Variance(0.0, quantise=False)",
    "Variance(1.5, feedback=True)",
    "Variance(1.0, packing='words')",
    "Variance(1.0, on_underflow='reset')",
    "VarianceStrom(1.0, tau=0.3)",
    "Strom(0.3)",
    "ExDyna(0.1)",
    "ExDyna(0.1, topology='pairwise')",
    "ExDyna(0.1, topology='static', blocks=10)",
    "ExDyna(0.1, topology='official', control='official')",
    "ErrorFeedback(ExDyna(0.05))",
    "MiCRO(0.1)",
    "MiCRO(0.1, control='official')",
    "CLTK(0.1)",
    "CLTK(0.1, beta=0.3)",
    "DEFT(0.1)",
    "SIDCo(0.1)",
    "SIDCo(0.1, fit='pareto')",
    "SIDCo(0.1, fit='gamma')",
    "OkTopk(0.1)",
    "OkTopk(0.1, refresh=2)",
    "GTopK(0.1)",
    "ErrorFeedback(GTopK(0.05))",
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
    "ErrorFeedback(Route(TopK(0.1), rest=QSGD(4), smallest=40))",
    "Cast(ErrorFeedback(TopK(0.1)))",
    "ErrorFeedback(Cast(PowerSGD(1), dtype='float16'))",
    "ErrorFeedback(Cast(TopK(0.1), bits=2))",
    "ErrorFeedback(Cast(ExDyna(0.1), bits=1))",
    "ErrorFeedback(Cast(RandomBlock(0.1), bits=4))",
    "ErrorFeedback(Cast(GTopK(0.1), bits=8))",
    "Cast(DGC(0.1), bits=4)",
)
REPRESENTATIVES = (
    "Dense()",  # remembers nothing; all_mean
    "ErrorFeedback(TopK(0.1))",  # entries that are unsent; all_gather of messages with any length
    "ErrorFeedback(TopK(0.1, agree=True), decay=0.9)",  # the union of all choices; all_mean of what it holds
    "ErrorFeedback(ExDyna(0.05))",  # what all know alike, and what depends on the number of workers
    "Momentum(ErrorFeedback(RandomBlock(0.1)), nesterov=True, masking=False)",  # two memories, shared draws
    "ErrorFeedback(PowerSGD(2))",  # factors that the next step starts from, matrices and the rest
    "QSGD(4)",  # codes of a fixed length; drops what it rounds away
    "CLTK(0.1, beta=0.3)",  # broadcast
    "OkTopk(0.1, refresh=2)",  # all_to_all, and a memory inside the method
    "ErrorFeedback(LowBit(2, block=64, smallest=0))",  # equal all_to_all, and owners of parts who remember means
    "ErrorFeedback(GTopK(0.05))",  # shift
    "Variance(1.5, feedback=True)",  # wants squares; entries of degree two
    "Warmup(DGC(0.1), steps=3, densities=(1.0, 0.5, 0.2))",  # a schedule around a memory
    "ErrorFeedback(Cast(PowerSGD(1), dtype='float16'))",  # half precision on the wire
)
EXAMPLES: dict[str, Reducer[Any, Any]] = {spelling: parse(spelling) for spelling in SPELLINGS}


def representatives(*wants: type) -> list[str]:
    """Spellings of reducers that take one of `wants`, one of each kind; all of them if the run is to take its time."""
    chosen = SPELLINGS if os.environ.get("THINWIRE_TEST_ALL") else REPRESENTATIVES
    return [spelling for spelling in chosen if EXAMPLES[spelling].wants in wants]
