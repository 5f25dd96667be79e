"""One paper, one file, reading like its algorithm; a paper with parts is a folder. A new one is a line in `METHODS`.

A method talks through `Comm` and the verbs of `exchange`. It knows no training loop and no clock.
"""

from typing import Any

from thinwire.core.reducer import Reducer
from thinwire.methods.clt_k import CLTK
from thinwire.methods.dad.auto_dad import AutoDAD
from thinwire.methods.dad.dad import DAD
from thinwire.methods.dad.edad import EDAD
from thinwire.methods.dad.published import PublishedRankDAD
from thinwire.methods.dad.rank_dad import RankDAD
from thinwire.methods.deft import DEFT
from thinwire.methods.demo import DeMo
from thinwire.methods.dense import Dense
from thinwire.methods.dgc import DGC
from thinwire.methods.exdyna.method import ExDyna
from thinwire.methods.gtop_k import GTopK
from thinwire.methods.low_bit import LowBit
from thinwire.methods.micro import MiCRO
from thinwire.methods.ok_topk import OkTopk
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.random_block import RandomBlock
from thinwire.methods.random_k import RandomK
from thinwire.methods.sidco import SIDCo
from thinwire.methods.sign_sgd import SignSGD
from thinwire.methods.sparse_loco import SparseLoCo
from thinwire.methods.strom import Strom
from thinwire.methods.threshold import Threshold
from thinwire.methods.top_k import TopK
from thinwire.methods.variance.variance import Variance
from thinwire.methods.variance.variance_strom import VarianceStrom

METHODS: dict[str, type[Reducer[Any, Any]]] = {
    "AutoDAD": AutoDAD,
    "CLTK": CLTK,
    "DAD": DAD,
    "DEFT": DEFT,
    "DeMo": DeMo,
    "Dense": Dense,
    "DGC": DGC,
    "EDAD": EDAD,
    "ExDyna": ExDyna,
    "GTopK": GTopK,
    "LowBit": LowBit,
    "MiCRO": MiCRO,
    "OkTopk": OkTopk,
    "PowerSGD": PowerSGD,
    "PublishedRankDAD": PublishedRankDAD,
    "QSGD": QSGD,
    "RandomBlock": RandomBlock,
    "RandomK": RandomK,
    "RankDAD": RankDAD,
    "SIDCo": SIDCo,
    "SignSGD": SignSGD,
    "SparseLoCo": SparseLoCo,
    "Strom": Strom,
    "Threshold": Threshold,
    "TopK": TopK,
    "Variance": Variance,
    "VarianceStrom": VarianceStrom,
}
