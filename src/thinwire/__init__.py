"""Train PyTorch models over thin wires.

Names are loaded when they are first used: `import thinwire` alone imports nothing else, not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire._moved import MOVED, keep_old_names

if TYPE_CHECKING:
    from thinwire.core.reducer import Layout as Layout
    from thinwire.core.reducer import MethodWarning as MethodWarning
    from thinwire.core.reducer import Reducer as Reducer
    from thinwire.doors.ddp import Handle as Handle
    from thinwire.doors.ddp import attach as attach
    from thinwire.doors.ddp import handle as handle
    from thinwire.doors.ddp import wrap as wrap
    from thinwire.doors.local import LocalHandle as LocalHandle
    from thinwire.doors.local import Outer as Outer
    from thinwire.doors.local import local as local
    from thinwire.methods import METHODS as METHODS
    from thinwire.methods.clt_k import CLTK as CLTK
    from thinwire.methods.dad.auto_dad import AutoDAD as AutoDAD
    from thinwire.methods.dad.dad import DAD as DAD
    from thinwire.methods.dad.edad import EDAD as EDAD
    from thinwire.methods.dad.rank_dad import RankDAD as RankDAD
    from thinwire.methods.deft import DEFT as DEFT
    from thinwire.methods.demo import DeMo as DeMo
    from thinwire.methods.dense import Dense as Dense
    from thinwire.methods.dgc import DGC as DGC
    from thinwire.methods.exdyna.method import ExDyna as ExDyna
    from thinwire.methods.gtop_k import GTopK as GTopK
    from thinwire.methods.low_bit import LowBit as LowBit
    from thinwire.methods.micro import MiCRO as MiCRO
    from thinwire.methods.ok_topk import OkTopk as OkTopk
    from thinwire.methods.powersgd import PowerSGD as PowerSGD
    from thinwire.methods.qsgd import QSGD as QSGD
    from thinwire.methods.random_block import RandomBlock as RandomBlock
    from thinwire.methods.random_k import RandomK as RandomK
    from thinwire.methods.sidco import SIDCo as SIDCo
    from thinwire.methods.sign_sgd import SignSGD as SignSGD
    from thinwire.methods.sparse_loco import SparseLoCo as SparseLoCo
    from thinwire.methods.strom import Strom as Strom
    from thinwire.methods.threshold import Threshold as Threshold
    from thinwire.methods.top_k import TopK as TopK
    from thinwire.methods.variance.variance import Variance as Variance
    from thinwire.methods.variance.variance_strom import VarianceStrom as VarianceStrom
    from thinwire.spelling import parse as parse
    from thinwire.step.agreement import Disagreement as Disagreement
    from thinwire.step.checkpoints import CheckpointError as CheckpointError
    from thinwire.wrappers.adam import Adam as Adam
    from thinwire.wrappers.cast import Cast as Cast
    from thinwire.wrappers.feedback import ErrorFeedback as ErrorFeedback
    from thinwire.wrappers.local_steps import LocalSteps as LocalSteps
    from thinwire.wrappers.momentum import Momentum as Momentum
    from thinwire.wrappers.route import Route as Route
    from thinwire.wrappers.warmup import Warmup as Warmup

__version__ = "0.2.0.dev0"

_HOMES = {
    "Adam": "wrappers.adam",
    "AutoDAD": "methods.dad.auto_dad",
    "CLTK": "methods.clt_k",
    "Cast": "wrappers.cast",
    "CheckpointError": "step.checkpoints",
    "DAD": "methods.dad.dad",
    "DEFT": "methods.deft",
    "DGC": "methods.dgc",
    "DeMo": "methods.demo",
    "Dense": "methods.dense",
    "Disagreement": "step.agreement",
    "EDAD": "methods.dad.edad",
    "ErrorFeedback": "wrappers.feedback",
    "ExDyna": "methods.exdyna.method",
    "GTopK": "methods.gtop_k",
    "Handle": "doors.ddp",
    "Layout": "core.reducer",
    "LocalHandle": "doors.local",
    "LocalSteps": "wrappers.local_steps",
    "METHODS": "methods",
    "MethodWarning": "core.reducer",
    "LowBit": "methods.low_bit",
    "MiCRO": "methods.micro",
    "Momentum": "wrappers.momentum",
    "OkTopk": "methods.ok_topk",
    "Outer": "doors.local",
    "PowerSGD": "methods.powersgd",
    "QSGD": "methods.qsgd",
    "RandomBlock": "methods.random_block",
    "RandomK": "methods.random_k",
    "RankDAD": "methods.dad.rank_dad",
    "Reducer": "core.reducer",
    "Route": "wrappers.route",
    "SIDCo": "methods.sidco",
    "SignSGD": "methods.sign_sgd",
    "SparseLoCo": "methods.sparse_loco",
    "Strom": "methods.strom",
    "Threshold": "methods.threshold",
    "TopK": "methods.top_k",
    "Variance": "methods.variance.variance",
    "VarianceStrom": "methods.variance.variance_strom",
    "Warmup": "wrappers.warmup",
    "attach": "doors.ddp",
    "handle": "doors.ddp",
    "local": "doors.local",
    "parse": "spelling",
    "wrap": "doors.ddp",
}
_ROOMS = ("comm", "core", "doors", "exchange", "kernels", "methods", "plan", "spelling", "step", "testing", "wrappers")
__all__ = [*_HOMES, "__version__"]

keep_old_names()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(f"thinwire.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name in _ROOMS:
        return import_module(f"thinwire.{name}")
    if name in MOVED:
        return import_module(f"thinwire.{MOVED[name].split()[0]}")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
