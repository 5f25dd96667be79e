"""What Variance does to the letter of the paper when told to, and not by default, because it costs bytes or gradients.

`packing="words"`: an entry is a word of 32 bits with its sign, exponent and index; the gaps between entries take a
third of that. `on_underflow="reset"`: an entry that was sure but too small to be told is forgotten as if it had been
sent; kept, it waits and grows.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.exchange import bytes as wire

WORDS = wire.encode_words, wire.decode_words


def reset(r: Tensor, v: Tensor, too_small: Tensor) -> float:
    """Forget these entries; how long what they held was."""
    kernels.clear(v, too_small)
    return float(torch.linalg.vector_norm(kernels.take(r, too_small)))
