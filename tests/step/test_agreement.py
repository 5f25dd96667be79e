"""Checksums by which ranks find out that they differ."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.step.agreement import checksum


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_a_checksum_sees_two_values_change_places(values, data):
    x = torch.tensor(values)
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    assert (checksum([x]) == checksum([y])) == torch.equal(x.view(torch.int32), y.view(torch.int32))


def test_a_checksum_takes_anything_that_a_model_may_hold():
    nothing, numbers = torch.empty(0, 4), torch.arange(70_000)
    parts = [nothing, numbers, torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)]
    assert checksum(parts) == checksum([part.clone() for part in parts]) != 0
    assert checksum([numbers]) != checksum([numbers.flip(0)])


def test_a_checksum_sees_places_change_whose_values_differ_in_their_highest_bits_alone():
    for x in (torch.ones(3000, dtype=torch.float64), torch.zeros(3000, dtype=torch.int64)):
        x[7] += 2**60 if x.dtype is torch.int64 else 1
        assert checksum([x]) != checksum([x.roll(512)]) != checksum([x.roll(1024)]) != checksum([x])
