"""ExDyna against a simulation of all its workers written with plain loops, which shares no code with it."""

import itertools
import math
import random
from statistics import median

import pytest
import torch

from thinwire import ErrorFeedback, ExDyna
from thinwire.comm.threads import in_threads
from thread_runs import layout_of


class Oracle:
    """All workers of ErrorFeedback(ExDyna(...)), an entry at a time, in Python's own numbers."""

    def __init__(self, method, workers, numel):
        self.d, self.topology, self.control = method.density, method.topology, method.control
        self.n, self.ng, self.k = workers, numel, min(numel, max(1, math.floor(method.density * numel + 1e-9)))
        self.residuals = [[0.0] * numel for _ in range(workers)]
        self.t, self.delta, self.reach, self.trend, self.lost = 0, None, 0.1, 0.0, False
        if self.control == "official":
            self.delta = 1 / (2 * math.sqrt(self.k))
        self.margin = 1.0
        self.fullest, self.loads = 0.0, None
        if self.topology == "static":
            self.size, self.blocks = 1, numel
        elif self.topology == "official" and numel // 1024 >= 32:
            self.size, self.blocks = numel // 1024 - numel // 1024 % 32, 1024
        else:
            wanted = None if self.topology == "official" else method.blocks
            blocks = max(min(wanted or max(1024, 64 * workers), numel // 32), min(4 * workers, numel), 1)
            self.size = -(-numel // blocks)
            while self.size > 32 and self.size % 32:
                self.size += 1
            self.blocks = -(-numel // self.size)
        self.shares = [self.blocks // workers + (1 if j < self.blocks % workers else 0) for j in range(workers)]

    def ranges(self):
        found, block = [], 0
        for share in self.shares:
            ends = [self.ng if b >= self.blocks else b * self.size for b in (block, block + share)]
            found.append(tuple(ends))
            block += share
        assert block == self.blocks
        return found

    def kth(self, values):
        return sorted((abs(v) for v in values), reverse=True)[min(max(round(self.d * self.ng), 1), self.ng) - 1]

    def most(self, rank):
        fair = self.k / self.n
        if self.topology != "static":
            slots = math.ceil(1.01 * self.k)
            return slots // self.n + (1 if rank < slots % self.n else 0)
        expected = max(fair, self.fullest) if self.fullest else 2 * fair
        return math.ceil(1.1 * expected + 3 * math.sqrt(expected)) + 2

    def dense_is_cheaper(self):
        widest = max(high - low for low, high in self.ranges())
        picks = min(self.most(0), widest)
        bits = min(widest, picks * (2 + math.log2(widest / picks)))
        message = 24 + 8 + 14 + math.ceil(bits / 8) + 1
        return (self.n - 1) * message >= 2 * (self.n - 1) / self.n * 8 * (self.ng - self.k)

    def step(self, gradients):
        """The mean that is applied, and who sent which indices (None if all was sent)."""
        a = self.residuals
        for row, gradient in zip(a, gradients):
            for i, g in enumerate(gradient):
                row[i] += g
        if self.dense_is_cheaper():
            self.fullest = 0.0
            return self.send(range(self.ng)), None
        if self.delta is None:
            self.delta = min(max(median(self.kth(row) for row in a), 1e-30), 1e30)

        chosen, above, far_above = [], [], 0
        for rank in range(self.n):
            low, high = self.ranges()[(self.t + rank) % self.n]
            mine = [i for i in range(low, high) if abs(a[rank][i]) >= self.delta]
            if self.control == "official":
                if not mine and high > low:
                    mine = [low + self.t % (high - low)]
                above.append(len(mine))
            else:
                above.append(len(mine))
                far_above += sum(abs(a[rank][i]) >= self.delta * math.exp(self.reach) for i in mine)
                if len(mine) > self.most(rank):
                    largest = sorted(mine, key=lambda i: -abs(a[rank][i]))[: self.most(rank)]
                    mine = sorted(largest)
            chosen.append(mine)
        measured = median(self.kth(row) for row in a) if self.lost else 0.0
        out = self.send(sorted(i for mine in chosen for i in mine))

        slots = sum(self.most(rank) for rank in range(self.n))
        by_part = [above[(part - self.t) % self.n] for part in range(self.n)]
        rule = {"recut": self.recut, "pairwise": self.pairwise, "official": self.neighbours, "static": lambda *_: None}
        if self.control == "official" or sum(by_part) <= 3 * self.k * self.margin:
            self.fullest = max(by_part) * self.k / sum(by_part) if sum(by_part) else 0.0
            rule[self.topology](by_part, chosen)
        sent = sum(map(len, chosen))
        if self.control == "official":
            x = sent / self.k
            self.delta *= 1.005 if x > 1.1 else 1.00125 if x > 0.909 else 0.995
        else:
            self.scale(sent, slots, above, far_above, measured)
        self.delta = min(max(self.delta, 1e-30), 1e30)
        self.t += 1
        return out, chosen

    def send(self, indices):
        out = [0.0] * self.ng
        for i in indices:
            for rank, row in enumerate(self.residuals):
                part = row[i] * (1 / self.n)
                out[i] = part if rank == 0 else out[i] + part
                row[i] = 0.0
        return out

    def scale(self, sent, slots, above, far_above, measured):
        halvings = math.log2((sum(above) + 1) / (far_above + 1))
        self.reach *= min(max(1 / max(halvings, 1e-9), 0.25), 4.0) ** 0.3
        self.reach = min(max(self.reach, 1e-4), 1.0)
        if measured > 0:
            self.lost, self.trend, self.delta = False, 0.0, measured
            return
        fair = self.k * self.margin / self.n
        self.lost = median(above) > 3 * (1 + 4 / math.sqrt(self.k)) * fair
        most = 2 * self.margin * slots / self.n
        error = sum(min(one, most) for one in above) / (self.k * self.margin) - 1
        if slots < 1.1 * self.k + 1:
            self.margin = min(max(self.margin * math.exp(0.6 * (1 - sent / self.k)), 1.0), 10.0)
        self.trend = min(max(self.trend + min(0.25, 0.8 / self.n) * error, -1.0), 1.0)
        self.delta *= math.exp((0.6 * error + self.trend) * self.reach / math.log(2))

    def smooth(self, seen):
        if self.loads is None:
            self.loads = [float(s) for s in seen]
        else:
            self.loads = [0.8 * old + (1 - 0.8) * new for old, new in zip(self.loads, seen)]

    def pairwise(self, by_part, chosen):
        self.smooth(by_part)
        for j in range(self.n - 1):
            x, y = self.loads[j], self.loads[j + 1]
            giver, taker = (j, j + 1) if x > y else (j + 1, j)
            block = self.loads[giver] / self.shares[giver]
            if abs(x - y) > block and abs(x - y) > 3 * math.sqrt((x + y) / ((1 + 0.8) / (1 - 0.8))):
                blocks = min(max(1, int(abs(x - y) / (4 * block))), self.shares[giver] - 1)
                self.shares[giver] -= blocks
                self.shares[taker] += blocks
                self.loads[giver] -= blocks * block
                self.loads[taker] += blocks * block

    def recut(self, by_part, chosen):
        counts = [0] * self.blocks
        for mine in chosen:
            for i in mine:
                counts[min(i // self.size, self.blocks - 1)] += 1
        first = 0
        for share, load in zip(self.shares, by_part):
            blocks = range(first, first + share)
            factor = load / max(1, sum(counts[b] for b in blocks))
            for b in blocks:
                counts[b] = counts[b] * factor
            first += share
        self.smooth(counts)
        total = 0.0
        sums = [0.0] + [total := total + load for load in self.loads]

        def heaviest(shares):
            ends = [sum(shares[:j]) for j in range(self.n + 1)]
            return max(sums[end] - sums[start] for start, end in itertools.pairwise(ends))

        ends = [0]
        for j in range(1, self.n):
            goal = total * j / self.n
            end = next(b for b in range(self.blocks + 1) if sums[b] >= goal)
            if end and goal - sums[end - 1] < sums[end] - goal:
                end -= 1
            ends.append(min(max(end, ends[-1] + 1), self.blocks - self.n + j))
        new = [end - start for start, end in zip(ends, [*ends[1:], self.blocks])]
        noise = math.sqrt(total / self.n / ((1 + 0.8) / (1 - 0.8)))
        if heaviest(self.shares) - heaviest(new) > 4 * noise:
            self.shares = new

    def neighbours(self, by_part, chosen):
        total, picks, c = sum(by_part), list(by_part), self.shares
        average, est, fewest = total // self.n, self.size * total // self.ng, self.blocks / (4 * self.n)
        for j in range(self.n - 1) if average else ():
            x, y = picks[j] / average, picks[j + 1] / average
            if x > 1.05 and y < 0.95238 and c[j] - 1 >= fewest:
                c[j], c[j + 1], picks[j], picks[j + 1] = c[j] - 1, c[j + 1] + 1, picks[j] - est, picks[j + 1] + est
            x, y = picks[j] / average, picks[j + 1] / average
            if x < 0.95238 and y > 1.05 and c[j + 1] - 1 >= fewest:
                c[j], c[j + 1], picks[j], picks[j + 1] = c[j] + 1, c[j + 1] - 1, picks[j] + est, picks[j + 1] - est


PUBLISHED = 100  # the configuration in which the published cut, of 32768 entries or more, applies


def configuration(seed):
    if seed == PUBLISHED:
        sizes = {"workers": 2, "numel": 34_567, "steps": 8, "scale": 0.05, "jump": 1, "slope": 3}
        return dict(method=ExDyna.official(0.02), **sizes)
    draw = random.Random(seed)
    official = draw.random() < 0.3
    numel = draw.choice([1, 2, 7, 31, 32, 97, 257, 400, 641, 1023])
    return {
        "method": ExDyna(
            draw.choice([0.5, 0.2, 0.1, 0.05, 0.02]),
            topology="official" if official else draw.choice(["recut", "recut", "pairwise", "static"]),
            control="official" if official or draw.random() < 0.15 else "fast",
            blocks=draw.choice([None, None, 3, 40]),
        ),
        "workers": draw.choice([1, 2, 3, 4, 5]),
        "numel": numel,
        "steps": draw.choice([8, 14]),
        "scale": 10 ** draw.uniform(-6, 3),
        "jump": draw.choice([1, 10, 0.1, 0]),
        "slope": draw.choice([0, 3]),
    }


def gradients_of(numel, workers, steps, scale, jump, slope, seed, **_):
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(steps, workers, numel, generator=generator, dtype=torch.float64) * scale
    grads *= torch.exp(-slope * torch.linspace(0, 1, numel, dtype=torch.float64))  # loads that differ
    grads[steps // 2 :] *= jump
    return grads


@pytest.mark.parametrize("seed", range(PUBLISHED + 1))
def test_every_step_is_that_of_the_oracle(seed):
    config = configuration(seed)
    method, workers, steps, numel = (config[name] for name in ("method", "workers", "steps", "numel"))
    grads = gradients_of(**config, seed=seed)
    oracle = Oracle(method, workers, numel)
    expected = []
    for step in range(steps):
        out, chosen = oracle.step(grads[step].tolist())
        expected.append((out, chosen, oracle.delta, list(oracle.shares), [list(row) for row in oracle.residuals]))

    def work(comm):
        reducer = ErrorFeedback(method)
        state, told = reducer.init(layout_of((numel,), dtype=torch.float64)), []
        for step in range(steps):
            out = torch.full((numel,), torch.nan, dtype=torch.float64)
            reducer.reduce(grads[step, comm.rank].clone(), state, comm, out)
            inner = state.inner
            told.append((out, list(inner.picks), inner.control.threshold, list(inner.shares), state.residual.tolist()))
        return told

    for rank, told in enumerate(in_threads(workers, work)):
        for step, (out, picks, threshold, shares, residual) in enumerate(told):
            wanted_out, chosen, delta, wanted_shares, residuals = expected[step]
            where = f"worker {rank}, step {step} of {config}"
            assert out.tolist() == wanted_out, where
            assert picks == ([] if chosen is None else list(map(len, chosen))), where
            assert shares == wanted_shares, where
            assert (threshold or 0.0) == pytest.approx(delta or 0.0, rel=1e-12), where
            assert residual == residuals[rank], where


def test_the_configurations_reach_every_corner():
    """Or the test above would prove less than it says."""
    seen = set()
    for seed in range(PUBLISHED + 1):
        config = configuration(seed)
        oracle = Oracle(config["method"], config["workers"], config["numel"])
        before = list(oracle.shares)
        for gradient in gradients_of(**config, seed=seed).tolist():
            most = oracle.most(rank=0)
            _, chosen = oracle.step(gradient)
            over_full = chosen is not None and max(map(len, chosen)) == most
            seen |= {"dense"} if chosen is None else {oracle.topology, f"control {oracle.control}"}
            seen |= {"over-full"} if over_full and oracle.control == "fast" else set()
            seen |= {"lost"} if oracle.lost else set()
            seen |= {f"{oracle.topology} moved"} if oracle.shares != before else set()
    assert seen >= {"dense", "recut", "pairwise", "static", "official", "over-full", "lost"}
    assert seen >= {"recut moved", "pairwise moved", "official moved", "control fast", "control official"}
