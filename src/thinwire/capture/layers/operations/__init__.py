"""The kinds of layers that are known: how each runs forward, what it saves, how its gradients are made on the way back.

One entry a kind, with `@operation(...)`, beside its like; what has a weight and a bias goes through one autograd
Function (`weighted`). What an entry brings goes into a sink: `squares` and `factors` are two. Nothing here knows which,
and none of it knows a method.
"""

from thinwire.capture.layers.operations import convolution, embedding, linear, norms, recurrent  # noqa: F401  entries
from thinwire.capture.layers.operations.entry import OPERATIONS as OPERATIONS
from thinwire.capture.layers.operations.entry import Operation as Operation
from thinwire.capture.layers.operations.entry import operation as operation
from thinwire.capture.layers.operations.entry import operation_of as operation_of
from thinwire.capture.layers.operations.sink import PLAIN as PLAIN
from thinwire.capture.layers.operations.sink import Collector as Collector
from thinwire.capture.layers.operations.sink import Parts as Parts
from thinwire.capture.layers.operations.sink import Sink as Sink
from thinwire.capture.layers.operations.takeover import Captured as Captured
from thinwire.capture.layers.operations.takeover import give_back as give_back
from thinwire.capture.layers.operations.takeover import release as release
from thinwire.capture.layers.operations.takeover import take_over as take_over
