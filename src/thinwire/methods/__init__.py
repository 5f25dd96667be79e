"""One paper, one file. To add a method: write its file, and one line here."""

from typing import Any

from thinwire.methods.auto_dad import AutoDAD
from thinwire.methods.dad import DAD
from thinwire.methods.dense import Dense
from thinwire.methods.dgc import DGC
from thinwire.methods.edad import EDAD
from thinwire.methods.exdyna import ExDyna
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.random_block import RandomBlock
from thinwire.methods.random_k import RandomK
from thinwire.methods.rank_dad import RankDAD
from thinwire.methods.rank_dad_published import PublishedRankDAD
from thinwire.methods.sign_sgd import SignSGD
from thinwire.methods.strom import Strom
from thinwire.methods.threshold import Threshold
from thinwire.methods.top_k import TopK
from thinwire.methods.variance import Variance
from thinwire.methods.variance_strom import VarianceStrom
from thinwire.reducer import Reducer

METHODS: dict[str, type[Reducer[Any, Any]]] = {
    "AutoDAD": AutoDAD,
    "DAD": DAD,
    "Dense": Dense,
    "DGC": DGC,
    "EDAD": EDAD,
    "ExDyna": ExDyna,
    "PowerSGD": PowerSGD,
    "PublishedRankDAD": PublishedRankDAD,
    "QSGD": QSGD,
    "RandomBlock": RandomBlock,
    "RandomK": RandomK,
    "RankDAD": RankDAD,
    "SignSGD": SignSGD,
    "Strom": Strom,
    "Threshold": Threshold,
    "TopK": TopK,
    "Variance": Variance,
    "VarianceStrom": VarianceStrom,
}
