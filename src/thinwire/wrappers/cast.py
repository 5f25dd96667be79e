"""The same method with fewer bits a value on the wire."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.cast import CastComm
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange.values import FEW, FewBits
from thinwire.wrappers.feedback import check_takes_gradients


@dataclass(frozen=True)
class Cast(Reducer[Tensor, Any]):
    """The same method with values sent in half the bits, or with `bits` (1, 2, 4 or 8) in fewer still.

    What a worker loses by rounding its own values stays behind and is not lost. Where the network itself adds
    up, in fewer bits too, that error is nobody's: mass is conserved to the precision of the wire only.

    Values of `bits` go with a few magnitudes of their message: 1 bit is a sign and the mean magnitude. They are for
    entries that a sparse method has chosen, whose magnitudes lie close together, and for error feedback around them.
    Means of such values go two ways: the owner of a part averages, rounds, and keeps what rounding took.
    """

    inner: Reducer[Tensor, Any]
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    bits: int | None = None

    def __post_init__(self) -> None:
        check_takes_gradients(self.inner, "Cast")
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be 'bfloat16' or 'float16', not {self.dtype!r}")
        if self.bits is not None and self.bits not in FEW:
            raise ValueError(f"bits must be one of {', '.join(map(str, FEW))}, not {self.bits}: dtype says 16 of them")

    def init(self, layout: Layout, /) -> Any:
        return self.inner.init(layout)

    def reduce(self, x: Tensor, state: Any, comm: Comm, out: Tensor, /) -> None:
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float16
        self.inner.reduce(x, state, CastComm(comm, dtype if self.bits is None else FewBits(self.bits)), out)

    def metrics(self, state: Any, /) -> dict[str, float]:
        return self.inner.metrics(state)

    @property
    def conserves(self) -> bool:
        return False
