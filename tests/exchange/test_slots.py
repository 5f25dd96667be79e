"""Lengths that all workers know: long enough for any indices, in integers alone, and hardly longer than need be."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.exchange import bytes as wire
from thinwire.exchange import slots


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**12), st.floats(0, 1))
def test_a_length_needs_no_logarithm_of_the_machine(span: int, share: float) -> None:
    picks = max(1, round(share * span))
    bits = min(span, picks * (2 + math.log2(span / picks)))
    least = wire.HEADER + math.ceil(bits / 8) + 1
    assert least - 1 <= slots.longest(picks, span) <= least + 2 + 0.02 * picks


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_any_indices_fit(span: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    picks = int(torch.randint(0, span + 1, (), generator=draw))
    index = torch.randperm(span, generator=draw)[:picks].sort().values.int()
    message = slots.fill(index, span, slots.size(picks, span))
    assert message.numel() == slots.size(picks, span) and torch.equal(slots.read(message, span), index)
