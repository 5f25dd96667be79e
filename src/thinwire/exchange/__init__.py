"""The verbs that methods are written in: what they send leaves `x`, the rest stays.

Here: which entries travel, in which bytes, at what price. Below it: kernels and comm. It knows no method and no step.
"""

from thinwire.exchange.coded import PIECE as PIECE
from thinwire.exchange.coded import Code as Code
from thinwire.exchange.coded import gather_coded as gather_coded
from thinwire.exchange.coded import put as put
from thinwire.exchange.dense import dense as dense
from thinwire.exchange.dense import dense_bytes as dense_bytes
from thinwire.exchange.dense import dense_price as dense_price
from thinwire.exchange.dense import empty as empty
from thinwire.exchange.dense import fall_back as fall_back
from thinwire.exchange.dense import fall_back_at as fall_back_at
from thinwire.exchange.dense import mean_of as mean_of
from thinwire.exchange.dense import rounded as rounded
from thinwire.exchange.lengths import MessageRoom as MessageRoom
from thinwire.exchange.lengths import gather_bytes as gather_bytes
from thinwire.exchange.sparse import gather_pairs as gather_pairs
from thinwire.exchange.sparse import gather_union as gather_union
from thinwire.exchange.sparse import mean_at as mean_at
from thinwire.exchange.sparse import take as take
from thinwire.exchange.two_way import mean_two_ways as mean_two_ways
from thinwire.exchange.values import mean_of_rounded as mean_of_rounded
