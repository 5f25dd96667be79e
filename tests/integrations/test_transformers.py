"""Hugging Face's Trainer, in two real processes."""

import pytest
import torch

from framework_cases import LOCAL, LOSSY, STEPS
from processes import launch
from thinwire.integrations import DEFAULT

pytest.importorskip("transformers", reason="transformers is not installed: make test-frameworks has it")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks has it")

pytestmark = pytest.mark.timeout(1800)
METHODS = (DEFAULT, LOSSY, LOCAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def trained(folder):
    return launch(2, "transformers_cases:trained", folder=folder, timeout=900)


@pytest.fixture(scope="module")
def resumed(folder, trained):
    return launch(2, "transformers_cases:resumed", folder=folder, timeout=900)


@pytest.mark.parametrize("method", METHODS)
def test_trainer_keeps_replicas_equal_and_exchanges_in_every_step(trained, method):
    for told in trained:
        assert torch.equal(told[method]["parameters"], trained[0][method]["parameters"])
        assert told[method]["step"] == told[method]["seen"] == STEPS


def test_trainer_sends_what_the_method_should(trained):
    entries = trained[0][DEFAULT]["parameters"].numel()
    dense = 4 * entries * STEPS
    assert dense / 2 <= trained[0][DEFAULT]["payload"] < 0.7 * dense  # half the bits, and the roll calls
    assert trained[0][LOCAL]["payload"] < trained[0][LOSSY]["payload"] < trained[0][DEFAULT]["payload"]


def test_trainer_reaches_the_loss_of_plain_ddp_with_the_default(trained):
    assert trained[0][DEFAULT]["loss"] == pytest.approx(trained[0]["None"]["loss"], rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_trainer_resumes_to_the_same_bits_in_new_processes(trained, resumed, method):
    for before, after in zip(trained, resumed, strict=True):
        assert torch.equal(before[method]["parameters"], after[method]["parameters"])
        assert before[method]["residual"] == after[method]["residual"]
        assert after[method]["seen"] < STEPS == after[method]["step"]


def test_trainer_goes_on_to_the_same_bits_after_a_worker_was_killed(trained, tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1: exit code -9"):
        launch(2, "transformers_cases:killed", folder=str(tmp_path), timeout=900)
    again = launch(2, "transformers_cases:after_the_kill", folder=str(tmp_path), timeout=900)
    for before, after in zip(trained, again, strict=True):
        assert torch.equal(before[LOSSY]["parameters"], after["parameters"])
        assert before[LOSSY]["residual"] == after["residual"]


def test_trainer_says_what_a_checkpoint_without_our_state_costs(resumed):
    for told in resumed:
        assert len(told["without"]) == 1 and "residual" in told["without"][0]
