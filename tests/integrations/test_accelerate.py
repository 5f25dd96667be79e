"""Accelerate, in two real processes, against the same training by hand."""

import pytest
import torch

from framework_cases import LOCAL, LOSSY, STEPS
from processes import launch
from thinwire.integrations import DEFAULT

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks has it")

pytestmark = pytest.mark.timeout(1800)
METHODS = (DEFAULT, LOSSY, LOCAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def trained(folder):
    return launch(2, "accelerate_cases:trained", folder=folder, timeout=900)


@pytest.fixture(scope="module")
def resumed(folder, trained):
    return launch(2, "accelerate_cases:resumed", folder=folder, timeout=900)


@pytest.mark.parametrize("method", METHODS)
def test_accelerator_gives_the_bits_and_bytes_of_the_same_loop_by_hand(trained, method):
    for told in trained:
        assert torch.equal(told[method]["parameters"], trained[0][method]["parameters"])  # replicas
        hand = told[f"{method} by hand"]
        assert torch.equal(told[method]["parameters"], hand["parameters"])
        assert (told[method]["step"], told[method]["payload"]) == (STEPS, hand["payload"])


def test_accelerator_reaches_the_loss_of_plain_ddp_with_the_default(trained):
    assert trained[0][DEFAULT]["loss"] == pytest.approx(trained[0]["plain"]["loss"], rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_accelerator_resumes_to_the_same_bits_in_new_processes(trained, resumed, method):
    for before, after in zip(trained, resumed, strict=True):
        assert torch.equal(before[method]["parameters"], after[method]["parameters"])
        assert before[method]["residual"] == after[method]["residual"]


def test_accelerator_goes_on_to_the_same_bits_after_a_worker_was_killed(trained, tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1: exit code -9"):
        launch(2, "accelerate_cases:killed", folder=str(tmp_path), timeout=900)
    again = launch(2, "accelerate_cases:after_the_kill", folder=str(tmp_path), timeout=900)
    for before, after in zip(trained, again, strict=True):
        assert torch.equal(before[LOSSY]["parameters"], after["parameters"])
        assert before[LOSSY]["residual"] == after["residual"]


def test_accelerator_says_what_a_checkpoint_without_our_state_costs(resumed):
    for told in resumed:
        assert len(told["without"]) == 1 and "residual" in told["without"][0]


def test_attach_says_what_it_cannot_do(trained):
    assert [word.split()[0] for word in trained[0]["refused"]] == ["RankDAD", "this", "thinwire"]
