"""The kernels in numba: one thread, at the memory's speed, on torch's own memory.

What is compiled is cached on disk; `thinwire.kernels.warm` compiles it before training starts.
"""

from thinwire.kernels.cpu.common import covers as covers
from thinwire.kernels.cpu.gaps import pack_gaps as pack_gaps
from thinwire.kernels.cpu.gaps import pack_marks as pack_marks
from thinwire.kernels.cpu.gaps import pack_rice as pack_rice
from thinwire.kernels.cpu.gaps import survey as survey
from thinwire.kernels.cpu.gaps import unpack_gaps as unpack_gaps
from thinwire.kernels.cpu.gaps import unpack_marks as unpack_marks
from thinwire.kernels.cpu.gaps import unpack_rice as unpack_rice
from thinwire.kernels.cpu.low_bit import decode_blocks as decode_blocks
from thinwire.kernels.cpu.low_bit import encode_blocks as encode_blocks
from thinwire.kernels.cpu.pack import pack_bits as pack_bits
from thinwire.kernels.cpu.pack import pack_signs as pack_signs
from thinwire.kernels.cpu.pack import unpack_bits as unpack_bits
from thinwire.kernels.cpu.pack import unpack_signs as unpack_signs
from thinwire.kernels.cpu.rank import kth_magnitude as kth_magnitude
from thinwire.kernels.cpu.rank import quantile as quantile
from thinwire.kernels.cpu.rank import top_k as top_k
from thinwire.kernels.cpu.select import finite as finite
from thinwire.kernels.cpu.select import select as select
from thinwire.kernels.cpu.select import variance_step as variance_step
from thinwire.kernels.cpu.sparse import clear as clear
from thinwire.kernels.cpu.sparse import fill_sparse as fill_sparse
from thinwire.kernels.cpu.sparse import gather as gather
from thinwire.kernels.cpu.sparse import random_k as random_k
from thinwire.kernels.cpu.sparse import scatter_add as scatter_add
from thinwire.kernels.cpu.sparse import take as take
from thinwire.kernels.cpu.words import join_powers as join_powers
from thinwire.kernels.cpu.words import pack_words as pack_words
from thinwire.kernels.cpu.words import split_powers as split_powers
from thinwire.kernels.cpu.words import unpack_words as unpack_words
