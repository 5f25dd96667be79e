"""The collectives: processes (`torch`), threads (`crew`), nobody (`dry`)."""

from thinwire.comm.base import Comm as Comm
from thinwire.comm.base import Ledger as Ledger
