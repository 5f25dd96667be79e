"""Lightning's Trainer and Fabric, in two real processes, against the same training by hand."""

import pytest
import torch

from framework_cases import BATCHES, LOCAL, LOSSY, STEPS
from processes import launch
from thinwire.integrations import DEFAULT

pytest.importorskip("lightning", reason="lightning is not installed: make test-frameworks has it")

pytestmark = pytest.mark.timeout(1800)
METHODS = (DEFAULT, LOSSY, LOCAL, "RankDAD(2)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def trained(folder):
    return launch(2, "lightning_cases:trained", folder=folder, timeout=900)


@pytest.fixture(scope="module")
def resumed(folder, trained):
    kept = {method: trained[0][method]["checkpoint"] for method in METHODS}
    return launch(2, "lightning_cases:resumed", folder=folder, checkpoints=kept, timeout=900)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    return launch(2, "lightning_cases:fabric", folder=str(tmp_path_factory.mktemp("fabric")), timeout=900)


@pytest.mark.parametrize("method", METHODS)
def test_trainer_gives_the_bits_and_bytes_of_the_same_loop_by_hand(trained, method):
    for told in trained:
        assert torch.equal(told[method]["parameters"], trained[0][method]["parameters"])  # replicas
        hand = told[f"{method} by hand"]
        assert torch.equal(told[method]["parameters"], hand["parameters"])
        assert (told[method]["step"], told[method]["payload"]) == (hand["step"], hand["payload"])
        assert told[method]["step"] == STEPS


def test_trainer_reaches_the_loss_of_plain_ddp_with_the_default(trained):
    assert trained[0][DEFAULT]["loss"] == pytest.approx(trained[0]["plain"]["loss"], rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_trainer_resumes_to_the_same_bits_in_new_processes(trained, resumed, method):
    for before, after in zip(trained, resumed, strict=True):
        assert torch.equal(before[method]["parameters"], after[method]["parameters"])
        assert before[method]["residual"] == after[method]["residual"]
        assert after[method]["step"] == STEPS


def test_trainer_goes_on_to_the_same_bits_after_a_worker_was_killed(trained, tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1: exit code -9"):
        launch(2, "lightning_cases:killed", folder=str(tmp_path), timeout=900)
    again = launch(2, "lightning_cases:after_the_kill", folder=str(tmp_path), timeout=900)
    for before, after in zip(trained, again, strict=True):
        assert torch.equal(before[LOSSY]["parameters"], after["parameters"])
        assert before[LOSSY]["residual"] == after["residual"]


def test_trainer_says_what_a_checkpoint_without_our_state_costs(resumed):
    for told in resumed:
        assert len(told["without"]) == 1 and "residual" in told["without"][0]


def test_trainer_hands_over_the_scaler_and_logs(trained):
    for told in trained:
        assert torch.equal(told["scaled"]["parameters"], trained[0]["scaled"]["parameters"])
        assert told["scale"] == 64.0
        assert told[LOSSY]["logged"]["thinwire/residual_norm"] > 0
        assert told[LOSSY]["names"][0] == "net.0.weight"


@pytest.mark.parametrize("method", METHODS)
def test_fabric_gives_the_bits_and_bytes_of_the_same_loop_by_hand_and_resumes_to_them(fabric, method):
    for told in fabric:
        assert torch.equal(told[method]["parameters"], fabric[0][method]["parameters"])
        hand, again = told[f"{method} by hand"], told[f"{method} resumed"]
        assert torch.equal(told[method]["parameters"], hand["parameters"])
        assert told[method]["payload"] == hand["payload"]
        assert torch.equal(told[method]["parameters"], again["parameters"])
        assert again["residual"] == hand["residual"]
        assert told[method]["step"] == again["step"] == STEPS > BATCHES


def test_fabric_says_what_a_checkpoint_without_our_state_costs(fabric):
    for told in fabric:
        assert len(told["without"]) == 1 and "residual" in told["without"][0]
