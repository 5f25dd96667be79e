"""Bringing the factors of all workers together."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.cast import CastComm
from thinwire.comm.codec import as_bytes
from thinwire.core.factors import Factors, Form, Side, padded
from thinwire.exchange.values import FewBits


def agreed(local: Factors, comm: Comm) -> Factors:
    """The same factors, with the forms that all workers pad to."""
    if local.forms is not None or not local.uses:
        return replace(local, forms=local.forms or [])
    numbers = [use.form().numbers() for use in local.uses]
    device = local.uses[0].deltas.device
    flat = torch.tensor([n for row in numbers for n in row], dtype=torch.int32, device=device)
    most = comm.all_gather(flat).amax(0).split([len(row) for row in numbers])
    forms = [Form.of(row.tolist(), use.rule) for row, use in zip(most, local.uses, strict=True)]
    return replace(local, forms=forms)


def gather(local: Factors, which: list[int], comm: Comm) -> Factors:
    """The uses `which` of all workers, stacked, in one message. What is padded adds nothing to any product."""
    return gather_later(local, which, comm)()


def gather_later(local: Factors, which: list[int], comm: Comm) -> Callable[[], Factors]:
    """The same, asked for later: where trips cost much they go with the next message."""
    assert local.forms is not None
    sides: list[Side] = []
    for i in which:
        use, form = local.uses[i], local.forms[i]
        sides += [(use.inputs, form.inputs, form.input_dtype), (use.deltas, form.deltas, form.delta_dtype)]
    coming, uses = _stacked_later(sides, comm), list(local.uses)

    def result() -> Factors:
        stacked = coming()
        pairs = zip(which, stacked[::2], stacked[1::2], strict=True)
        return replace(local, uses=[replace(uses[i], inputs=a, deltas=d) for i, a, d in pairs], forms=None)

    return result


def gather_stacked(sides: list[Side], comm: Comm) -> list[Tensor]:
    """Tensors of all workers, each padded to its size and stacked along the first dimension, in one message."""
    return _stacked_later(sides, comm)()


def _stacked_later(sides: list[Side], comm: Comm) -> Callable[[], list[Tensor]]:
    if not sides:
        return list
    pieces = []
    for x, shape, dtype in sides:
        codec, whole = comm.carries if dtype.is_floating_point else None, padded(x.to(dtype), shape)
        pieces.append(as_bytes(whole) if codec is None else codec.encode(whole.reshape(-1)))
    if comm.carries is not None:  # few bits may know no nan: a byte says whether there is one
        finite = torch.stack([x.isfinite().all() for x, _, _ in sides]).all()
        pieces.append(finite.to(torch.uint8).view(1))
    comm.ledger.picked += sum(x.numel() for x, _, _ in sides)
    rows = comm.all_gather_later(torch.cat(pieces))
    return lambda: _unstacked(rows().split([piece.numel() for piece in pieces], dim=1), sides, comm)


def _unstacked(columns: tuple[Tensor, ...], sides: list[Side], comm: Comm) -> list[Tensor]:
    found = []
    for column, (_, shape, dtype) in zip(columns, sides, strict=False):
        codec, count = comm.carries if dtype.is_floating_point else None, torch.Size(shape).numel()
        if codec is None:
            rows = column.contiguous().view(-1).view(dtype)
        else:
            rows = codec.decode(column, count, dtype)
            rows = torch.where(columns[-1].bool(), rows, torch.nan)
        found.append(rows.view(comm.world * shape[0], *shape[1:]))
    return found


def in_bits(comm: Comm, bits: int | None) -> Comm:
    """The same workers, with factors in so many bits a value; None leaves them as they are."""
    if bits is None:
        return comm
    return CastComm(comm, torch.bfloat16 if bits == 16 else FewBits(bits))


def without_zeros(local: Factors, comm: Comm) -> Factors:
    """The same factors without rows of zeros, which add nothing. How many rows are left goes around before them."""
    uses = []
    for use in local.uses:
        if len(use.deltas):
            counts = use.deltas.flatten(1).any(1)
            if use.inputs.is_floating_point():
                counts &= use.inputs.flatten(1).any(1)
            use = replace(use, inputs=use.inputs[counts], deltas=use.deltas[counts])
        uses.append(use)
    if not uses:
        return local
    rows = torch.tensor([len(use.deltas) for use in uses], dtype=torch.int32, device=uses[0].deltas.device)
    most = comm.all_gather(rows).amax(0).tolist()
    forms = [
        replace(form, inputs=(count, *form.inputs[1:]), deltas=(count, *form.deltas[1:]))
        for count, form in zip(most, local.forms or (), strict=True)
    ]
    return replace(local, uses=uses, forms=forms)
