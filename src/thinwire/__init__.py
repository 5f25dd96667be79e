"""Train PyTorch models over thin wires."""

from thinwire.feedback import ErrorFeedback as ErrorFeedback
from thinwire.methods import METHODS as METHODS
from thinwire.methods.dense import Dense as Dense
from thinwire.methods.top_k import TopK as TopK
from thinwire.reducer import Layout as Layout
from thinwire.reducer import Reducer as Reducer
