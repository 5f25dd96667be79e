"""One paper, one file. To add a method: write its file, and one line here."""

from typing import Any

from thinwire.methods.auto_dad import AutoDAD
from thinwire.methods.clt_k import CLTK
from thinwire.methods.dad import DAD
from thinwire.methods.deft import DEFT
from thinwire.methods.dense import Dense
from thinwire.methods.dgc import DGC
from thinwire.methods.edad import EDAD
from thinwire.methods.exdyna import ExDyna
from thinwire.methods.gtop_k import GTopK
from thinwire.methods.micro import MiCRO
from thinwire.methods.ok_topk import OkTopk
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.random_block import RandomBlock
from thinwire.methods.random_k import RandomK
from thinwire.methods.rank_dad import RankDAD
from thinwire.methods.rank_dad_published import PublishedRankDAD
from thinwire.methods.sidco import SIDCo
from thinwire.methods.sign_sgd import SignSGD
from thinwire.methods.strom import Strom
from thinwire.methods.threshold import Threshold
from thinwire.methods.top_k import TopK
from thinwire.methods.variance import Variance
from thinwire.methods.variance_strom import VarianceStrom
from thinwire.reducer import Reducer

METHODS: dict[str, type[Reducer[Any, Any]]] = {
    "AutoDAD": AutoDAD,
    "CLTK": CLTK,
    "DAD": DAD,
    "DEFT": DEFT,
    "Dense": Dense,
    "DGC": DGC,
    "EDAD": EDAD,
    "ExDyna": ExDyna,
    "GTopK": GTopK,
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
    "Strom": Strom,
    "Threshold": Threshold,
    "TopK": TopK,
    "Variance": Variance,
    "VarianceStrom": VarianceStrom,
}
