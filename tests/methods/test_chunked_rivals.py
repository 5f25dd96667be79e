"""DeMo and SparseLoCo against twins that are written entry by entry, after what their public code does."""

import math

import pytest
import torch
from torch import Tensor

from thinwire import Cast, DeMo, Layout, LocalSteps, SparseLoCo, parse
from thinwire.exchange import chunks
from thinwire.methods.demo import cosines
from thread_runs import gradients, layout_of, run


def tiles(layout: Layout, flat: Tensor, side: int) -> list[tuple[Tensor, slice, list[tuple[slice, slice]]]]:
    """For each parameter: it as a matrix, where it lies, and the chunks of the matrix."""
    found, start = [], 0
    for shape, size in zip(layout.shapes, layout.sizes, strict=True):
        rows = shape[0] if len(shape) > 1 else 1
        matrix = flat[start : start + size].view(rows, -1)
        sides = [max(d for d in range(1, min(n, side) + 1) if n % d == 0) for n in matrix.shape]
        places = [
            (slice(r, r + sides[0]), slice(c, c + sides[1]))
            for r in range(0, matrix.shape[0], sides[0])
            for c in range(0, matrix.shape[1], sides[1])
        ]
        found.append((matrix, slice(start, start + size), places))
        start += size
    return found


def wave(k: int, n: int) -> Tensor:
    """One cosine of the transform, of length one."""
    entries = torch.tensor([math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)], dtype=torch.float64)
    return entries / entries.norm()


def largest_of(components: dict[tuple[int, int], float], k: int) -> dict[tuple[int, int], float]:
    return dict(sorted(components.items(), key=lambda item: -abs(item[1]))[:k])


def averaged(sent: list[dict[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    places = {place for each in sent for place in each}
    values = {place: [each[place] for each in sent if place in each] for place in places}
    return {place: sum(found) / len(found) for place, found in values.items()}


LAYOUT = layout_of((12, 10), (9,), (4, 3, 2), dtype=torch.float64)


def test_demo_is_what_its_twin_does():
    side, k, decay, world, steps = 6, 3, 0.9, 3, 3
    grads = gradients(steps, world, LAYOUT.numel, torch.float64)
    held = [torch.zeros(LAYOUT.numel, dtype=torch.float64) for _ in range(world)]
    wanted = torch.zeros(steps, LAYOUT.numel, dtype=torch.float64)
    for step in range(steps):
        for rank in range(world):
            held[rank] = decay * held[rank] + grads[step, rank]
        cut = [tiles(LAYOUT, momentum, side) for momentum in held]
        for number, (out, _, places) in enumerate(tiles(LAYOUT, wanted[step], side)):
            for place in places:
                sent = []
                for rank in range(world):
                    tile = cut[rank][number][0][place]
                    high, wide = tile.shape
                    found = {
                        (i, j): float(wave(i, high) @ tile @ wave(j, wide)) for i in range(high) for j in range(wide)
                    }
                    sent.append(largest_of(found, k))
                    for (i, j), value in sent[-1].items():
                        tile -= value * torch.outer(wave(i, high), wave(j, wide))
                for (i, j), value in averaged(sent).items():
                    out[place] += value * torch.outer(wave(i, high), wave(j, wide))
    ran = run(DeMo(k, side, decay, sign=False), grads, LAYOUT)
    torch.testing.assert_close(ran.out, wanted)
    torch.testing.assert_close(torch.stack([state.momentum for state in ran.states]), torch.stack(held))
    assert torch.equal(run(DeMo(k, side, decay), grads, LAYOUT).out, ran.out.sign())


def in_levels(values: list[float], bits: int) -> list[float]:
    """Each value as the mean of those on its level."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
    step = 6 * deviation / 2**bits or 1.0
    levels = [min(max(round((v - mean) / step + 2 ** (bits - 1)), 0), 2**bits - 1) for v in values]
    means = {level: sum(v for v, other in zip(values, levels, strict=True) if other == level) for level in levels}
    return [means[level] / levels.count(level) for level in levels]


@pytest.mark.parametrize("bits", [2, 4])
def test_sparse_loco_is_what_its_twin_does(bits):
    side, k, decay, world, steps = 6, 5, 0.95, 3, 3
    grads = gradients(steps, world, LAYOUT.numel, torch.float64)
    held = [torch.zeros(LAYOUT.numel, dtype=torch.float64) for _ in range(world)]
    wanted = torch.zeros(steps, LAYOUT.numel, dtype=torch.float64)
    for step in range(steps):
        for rank in range(world):
            held[rank] = decay * held[rank] + grads[step, rank]
        cut = [tiles(LAYOUT, residual, side) for residual in held]
        for number, (out, _, places) in enumerate(tiles(LAYOUT, wanted[step], side)):
            sent: list[dict[tuple[int, int], float]] = []
            for rank in range(world):
                matrix, chosen = cut[rank][number][0], {}
                for rows, columns in places:
                    found = {
                        (i, j): float(matrix[i, j])
                        for i in range(rows.start, rows.stop)
                        for j in range(columns.start, columns.stop)
                    }
                    chosen |= largest_of(found, k)
                coded = in_levels(list(chosen.values()), bits)
                sent.append(dict(zip(chosen, coded, strict=True)))
                for place, value in sent[-1].items():
                    matrix[place] -= value
            for place, value in averaged(sent).items():
                out[place] = value
    ran = run(SparseLoCo(k, side, decay, bits), grads, LAYOUT)
    torch.testing.assert_close(ran.out, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack([s.residual for s in ran.states]), torch.stack(held), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_the_cosine_transform_is_orthonormal(n):
    waves = cosines(n, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(waves @ waves.T, torch.eye(n, dtype=torch.float64))


def test_a_position_in_a_chunk_of_64_by_64_takes_12_bits():
    layout = layout_of((128, 192))
    (ledger, *_) = run(SparseLoCo(), gradients(1, 2, layout.numel), layout).ledgers
    picks = 2 * 3 * 128
    assert ledger.entries == [("all_gather", picks * 12 // 8 + 4 * 4 + picks * 2 // 8)]
    (ledger, *_) = run(DeMo(), gradients(1, 2, layout.numel), layout).ledgers
    picks = 2 * 3 * 32
    assert ledger.entries == [("all_gather", picks * 12 // 8 + 4 * picks)]
    (ledger, *_) = run(Cast(DeMo(), bits=1), gradients(1, 2, layout.numel), layout).ledgers
    assert ledger.entries == [("all_gather", picks * 12 // 8 + 4 + picks // 8)]


def test_chunks_are_cut_and_joined_again():
    layout = layout_of((12, 10), (7,), (), (4, 3, 2), (0, 5))
    flat = torch.arange(float(layout.numel))
    back = torch.zeros_like(flat)
    for each in chunks.tiles_of(layout, 6):
        each.join(each.cut(flat), back)
    assert torch.equal(back, flat)


def test_tiny_layouts_are_averaged_whole():
    ran = run(SparseLoCo(), gradients(1, 4, 10))
    assert ran.ledgers[0].fallbacks == 1


def test_they_are_spelled_with_local_steps():
    assert parse("LocalSteps(SparseLoCo(), every=15)") == LocalSteps(SparseLoCo(), every=15)


@pytest.mark.parametrize(
    ("method", "wrong", "says"),
    [
        (DeMo, {"k": 0}, "k and chunk must be 1 or more"),
        (DeMo, {"decay": 1.5}, "decay must lie between 0 and 1"),
        (SparseLoCo, {"chunk": 0}, "k and chunk must be 1 or more"),
        (SparseLoCo, {"decay": -1.0}, "decay must lie between 0 and 1"),
        (SparseLoCo, {"bits": 9}, "bits must lie between 1 and 8"),
    ],
)
def test_bad_arguments_get_one_clear_error(method, wrong, says):
    with pytest.raises(ValueError, match=says):
        method(**wrong)
