"""Train PyTorch models over thin wires."""

from thinwire.agree import Disagreement as Disagreement
from thinwire.checkpoint import CheckpointError as CheckpointError
from thinwire.ddp import Handle as Handle
from thinwire.ddp import attach as attach
from thinwire.ddp import handle as handle
from thinwire.ddp import wrap as wrap
from thinwire.feedback import ErrorFeedback as ErrorFeedback
from thinwire.methods import METHODS as METHODS
from thinwire.methods.dense import Dense as Dense
from thinwire.methods.top_k import TopK as TopK
from thinwire.reducer import Layout as Layout
from thinwire.reducer import MethodWarning as MethodWarning
from thinwire.reducer import Reducer as Reducer
from thinwire.spelling import parse as parse
