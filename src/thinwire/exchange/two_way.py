"""A mean of codes that goes two ways: parts to their owners, the owners' means to all.

Worker r owns part r of the vector. It hears what everybody says about that part, averages, adds what it could not say
before, and tells all in the same code. A link carries 2 (workers - 1) / workers times the coded vector and waits for
two messages, however many workers there are; gathering carries (workers - 1) times.

Everybody decodes the same bytes, so all agree. What was handed in is what came out, what the workers have left, and
what the owners have left: `Owned`, of which every entry has one owner.
"""

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core.memory import Owned
from thinwire.exchange.coded import Code
from thinwire.exchange.dense import dense_price, fall_back


def mean_two_ways(x: Tensor, code: Code, comm: Comm, out: Tensor, owned: Owned) -> None:
    """Average what codes say about `x`; what this worker's own say leaves `x`."""
    starts = range(0, owned.size(comm.world) * comm.world, max(1, owned.size(comm.world)))
    stretches = [(min(s, x.numel()), min(s + owned.size(comm.world), x.numel())) for s in starts][: comm.world]
    size = max((code.nbytes(*stretch) for stretch in stretches), default=0)
    price = wire_bytes("all_to_all", comm.world * size, comm.world) + wire_bytes("all_gather", size, comm.world)
    if not size or price > dense_price(x, comm):
        return fall_back(x, comm, out)
    comm.ledger.picked += x.numel()

    sent = torch.zeros(comm.world, size, dtype=torch.uint8, device=x.device)
    for (start, stop), message in zip(stretches, sent, strict=True):
        code.encode(x[start:stop], start, message)
    heard = comm.all_to_all(sent)

    if owned.part is None:
        owned.part = x.new_zeros(owned.size(comm.world))
    start, stop = stretches[comm.rank]
    mine = owned.part[: stop - start]
    code.decode(heard, start, mine, 1 / comm.world, add=True)
    message = torch.zeros(size, dtype=torch.uint8, device=x.device)
    code.encode(mine, start, message)

    means = comm.all_gather(message)
    for (start, stop), message in zip(stretches, means, strict=True):
        code.decode(message.unsqueeze(0), start, out[start:stop], 1.0, add=False)
