"""The optimizers of a run: Muon and AdamW as one, clipping, learning rates."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.lab import LabError
from thinwire.lab.records.record import Run, read_steps
from thinwire.lab.run.muon import Muon
from thinwire.lab.run.optimizers import MuonAndAdamW, clip, inner_matrices, make_optimizer, set_rate
from thinwire.lab.run.rehearsal import rehearse
from thinwire.lab.tasks import load_task
from thinwire.lab.tasks.models import GPT, mlp

MUON = Run(optimizer="muon", lr=0.01, muon_lr=0.02, steps=100, schedule="linear")


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    chosen = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for step in range(count):
        set_rate(optimizer, step, MUON)
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=draw)).square().mean().backward()
        optimizer.step()


def test_muon_takes_the_matrices_of_the_blocks():
    model = GPT(16, 2, 2, 8)
    inside = names_of(model, inner_matrices(model))
    assert len(inside) == 8 and all(name.startswith("blocks.") and name.endswith(".weight") for name in inside)
    net = mlp(8, 16, 16, 2)
    assert names_of(net, inner_matrices(net)) == {"3.weight"}


def test_a_model_without_inner_matrices_is_refused():
    with pytest.raises(LabError, match="take --optimizer adamw"):
        make_optimizer(nn.Linear(3, 2), MUON)


def test_both_optimizers_step_at_their_own_rates():
    model = mlp(8, 16, 16, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, MUON)
    some_steps(model, optimizer, 1, 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 / 5, 0.01 / 5])  # warming up
    assert all(not torch.equal(before[name], now) for name, now in model.state_dict().items())
    change = model.state_dict()["3.weight"] - before["3.weight"]
    spectrum = torch.linalg.svdvals(change)
    assert spectrum[0] < 3 * spectrum[8], "muon's update is about orthogonal"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason=f"torch {torch.__version__} has no Muon to compare with")
def test_muon_is_torchs_but_for_rounding():
    torch.manual_seed(0)
    shapes = ((24, 8), (8, 24), (8, 24), (16, 16))
    model = nn.ParameterList([torch.randn(shape) for shape in shapes])
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    options = {"lr": 0.02, "weight_decay": 0.1}
    for net, optimizer in ((model, Muon(model, **options)), (twin, torch.optim.Muon(twin, **options))):
        draw = torch.Generator().manual_seed(1)
        for _ in range(10):
            for p in net:
                p.grad = torch.randn(p.shape, generator=draw)
            optimizer.step()
    for ours, torchs, before in zip(model, twin, start, strict=True):
        assert (ours - torchs).norm() < 0.02 * (ours - before).norm(), "bfloat16 has eight bits"


def test_muon_resumes_to_the_same_bits():
    torch.manual_seed(0)
    model = mlp(8, 16, 16, 2)
    optimizer = make_optimizer(model, MUON)
    some_steps(model, optimizer, 3, 1)
    twin = copy.deepcopy(model)
    resumed = make_optimizer(twin, MUON)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in ((model, optimizer), (twin, resumed)):
        some_steps(one, other, 3, 2)
    assert isinstance(resumed, MuonAndAdamW)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("method", ["Dense()", "LocalSteps(ErrorFeedback(PowerSGD(4)), every=2)"])
def test_muon_trains_with_exchanges_and_with_local_steps(method, tmp_path: Path):
    run = Run(method, "digits", "mlp", optimizer="muon", lr=2e-3, muon_lr=0.02, steps=20, evaluate_every=20, clip=1.0)
    run.write(tmp_path)
    rehearse(run, load_task("digits", "mlp", tmp_path), tmp_path)
    lines = read_steps(tmp_path / "rank0.jsonl")
    assert lines[-1]["validation_accuracy"] > 0.6


def test_gradients_are_clipped_and_adamw_gets_its_beta():
    model = mlp(4, 4, 2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    clip(model, Run(clip=0.5))
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm == pytest.approx(0.5, rel=1e-3)
    clip(model, Run())
    assert make_optimizer(model, Run(optimizer="adamw", beta2=0.95)).param_groups[0]["betas"] == (0.9, 0.95)
