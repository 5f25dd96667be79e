"""Values in few bits: what is stored, that rounding is settled after once, and that nothing is lost on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Cast, Dense, ErrorFeedback, parse
from thinwire.comm.cast import CastComm
from thinwire.comm.threads import in_threads
from thinwire.exchange import bytes as wire
from thinwire.exchange.values import FEW, FewBits, mean_of_rounded
from thread_runs import gradients, layout_of, run

BITS = sorted(FEW)


def values(n: int, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "tail":
        x = x.sign() * (2 + torch.rand(n, generator=generator, dtype=torch.float64).log().neg())
    if kind == "constant":
        x = x.sign() * 0.3
    if kind == "zeros":
        x[: n // 2] = 0
    return x.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(BITS),
    st.integers(0, 300),
    st.sampled_from(["normal", "tail", "constant", "zeros"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 5),
)
def test_rounding_what_was_rounded_changes_nothing_also_in_parts(bits, n, kind, dtype, parts):
    codec, x = FewBits(bits), values(n, kind, dtype)
    once = codec.rounded(x)
    assert once.shape == x.shape and once.dtype == x.dtype and codec.encode(x).numel() == codec.nbytes(n)
    assert torch.equal(codec.rounded(once), once)
    size = -(-n // parts)
    padded = torch.cat([once, once.new_zeros(size * parts - n)])
    again = torch.cat([codec.rounded(part) for part in padded.view(parts, size)]) if n else once
    assert torch.equal(again[:n], once)


@pytest.mark.parametrize(("bits", "most"), [(1, 0.11), (2, 0.05), (4, 0.007), (8, 3e-4)])
def test_what_a_tail_loses(bits, most):
    # Magnitudes above a threshold, as a sparse method chooses them: 2 and an exponential of mean 1 above it.
    x = values(20000, "tail")
    lost = (x - FewBits(bits).rounded(x)).square().sum() / x.square().sum()
    assert lost < most


def test_one_bit_is_a_sign_and_the_mean_magnitude():
    x = values(1000, "tail", torch.float64)
    torch.testing.assert_close(FewBits(1).rounded(x), x.sign() * x.abs().mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_messages_hold_them_beside_their_indices(bits):
    index, x = torch.arange(0, 3000, 3), values(1000, "tail")
    message = wire.encode(index, x, 3000, FEW[bits])
    found, said = wire.decode(message, 3000)
    assert torch.equal(found.long(), index) and torch.equal(said, FewBits(bits).rounded(x))
    assert message.numel() <= wire.encode_index(index, 3000).numel() + FewBits(bits).nbytes(1000)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_means_agree_and_what_rounding_takes_is_the_owners(bits, world):
    codec = FewBits(bits)
    sent = [codec.rounded(values(101, "tail", torch.float64, seed=rank)) for rank in range(world)]

    def work(comm):
        mean, rest = mean_of_rounded(sent[comm.rank].clone(), CastComm(comm, codec))
        return mean, rest

    found = in_threads(world, work)
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    kept = torch.stack([rest for _, rest in found]).mean(0)
    torch.testing.assert_close(found[0][0] + kept, torch.stack(sent).mean(0), rtol=1e-6, atol=1e-6)


SPARSE = ["TopK(0.1)", "TopK(0.1, agree=True)", "ExDyna(0.1)", "Threshold(1.2)", "RandomBlock(0.2)", "RandomK(0.2)"]
RIVALS = ["SIDCo(0.1)", "OkTopk(0.1)", "DEFT(0.1)", "GTopK(0.1)", "RandomBlock(0.2, agree=False)"]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("spelling", SPARSE + RIVALS)
def test_nothing_is_lost_by_sparse_methods(spelling, bits):
    grads = gradients(3, 3, 600, torch.float64)
    ran = run(ErrorFeedback(Cast(parse(spelling), bits=bits)), grads, layout_of((20, 30), dtype=torch.float64))
    held = torch.stack([state.residual for state in ran.states]).mean(0)
    torch.testing.assert_close(ran.out.sum(0) + held, grads.mean(1).sum(0), rtol=1e-6, atol=1e-6)


def test_fewer_bits_are_fewer_bytes():
    grads, layout = gradients(2, 2, 20000), layout_of((100, 200))
    sent = [run(Cast(parse("TopK(0.05)"), bits=bits), grads, layout).ledgers[0].payload for bits in BITS]
    whole = run(parse("TopK(0.05)"), grads, layout).ledgers[0].payload
    assert sent == sorted(sent) and sent[0] < whole / 3


def test_a_dense_mean_in_few_bits_goes_two_ways():
    ran = run(Cast(Dense(), bits=2), gradients(1, 3, 300))
    assert [op for op, _ in ran.ledgers[0].entries] == ["scatter_mean", "all_gather"]


def test_bits_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="bits must be one of 1, 2, 4, 8, not 3"):
        Cast(Dense(), bits=3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [0, 1, 7, -1])
def test_bytes_that_are_not_those_of_the_values_are_refused(bits, length):
    """Found by benchmarks/fuzz.py: torch's own error about a view told of a message that was cut."""
    whole = FewBits(bits).encode(torch.randn(100))
    with pytest.raises(wire.WireError, match="are not those of 100 values"):
        FewBits(bits).decode(whole[:length], 100, torch.float32)
