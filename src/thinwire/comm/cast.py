"""The same workers, with floating-point values sent in fewer bits."""

from thinwire.comm.protocol import CastComm as CastComm
