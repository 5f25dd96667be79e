"""How workers talk: processes (`torch`), threads (`threads`), nobody (`dry`), under one table of collectives.

Here every byte is counted. It knows no gradient and no method.
"""

from thinwire.comm.codec import Codec as Codec
from thinwire.comm.ledger import Ledger as Ledger
from thinwire.comm.protocol import Comm as Comm
