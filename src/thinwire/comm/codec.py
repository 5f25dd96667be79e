"""How floating-point values are stored while they travel."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Stores values in fewer bits. What `n` of them take is known beforehand, and the same on every machine.

    `dtype` names what a value is stored as, for messages that hold values beside their indices.
    """

    dtype: torch.dtype

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """The bytes of `n` values."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """A flat vector as bytes: `nbytes` of them."""

    @abstractmethod
    def decode(self, stored: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Bytes [..., nbytes(n)] as values [..., n]."""

    def rounded(self, values: Tensor) -> Tensor:
        """Values as they arrive. Rounding what has been rounded changes nothing."""
        flat = values.reshape(-1)
        return self.decode(self.encode(flat), flat.numel(), values.dtype).view_as(values)


class Floats(Codec):
    """Values as floating-point numbers of `dtype`, which the network itself can add up.

    Where `dtype` has a smaller range than float32, what is too large for it becomes the largest number there is.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def nbytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def cast(self, values: Tensor, workers: int = 1) -> Tensor:
        """Values as numbers of `dtype`, whose mean over the workers stays finite; what is infinite stays so."""
        info = torch.finfo(self.dtype)
        if info.max > 1e38:  # the range of float32: nothing can be too large
            return values.to(self.dtype)
        # When shares are added up, each of them and each partial sum may round up by half a unit.
        most = info.max / (1 + info.eps / 2) ** (workers + 1) if workers > 1 else info.max
        return torch.where(values.isinf(), values, values.clamp(-most, most)).to(self.dtype)

    def encode(self, values: Tensor) -> Tensor:
        return as_bytes(self.cast(values))

    def decode(self, stored: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        if stored.storage_offset() % self.dtype.itemsize or not stored.is_contiguous():
            stored = stored.clone(memory_format=torch.contiguous_format)  # bytes may begin at any address
        return stored.view(self.dtype).view(*stored.shape[:-1], n).to(dtype)

    def rounded(self, values: Tensor) -> Tensor:
        return self.cast(values).to(values.dtype)


def as_bytes(x: Tensor) -> Tensor:
    """What is only moved goes as bytes: backends differ in the dtypes that they know."""
    # An empty tensor may have strides that no view of another dtype can have.
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
