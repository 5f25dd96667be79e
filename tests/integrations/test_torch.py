"""What frameworks do with torch alone: compile, checkpoints of torch's own, a state that was left behind."""

import pytest
import torch

from processes import launch

pytestmark = pytest.mark.timeout(900)


def test_compiled_models_train_to_the_same_bits_under_the_same_names():
    for told in launch(2, "resume_cases:compiled", timeout=600):
        parameters, names, residual = told["never"]
        assert names == told["attached"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        for when in ("before", "after"):
            assert told[when][1] == names
            assert torch.equal(told[when][0], parameters) and told[when][2] == residual


def test_local_steps_of_a_compiled_model_go_on_in_one_that_is_not():
    for compiled, plain in launch(2, "resume_cases:compiled_local_steps", timeout=600):
        assert torch.equal(compiled, plain)


def test_a_frameworks_ddp_beside_ours_and_the_same_data_everywhere_are_told():
    for told in launch(2, "resume_cases:company", timeout=600):
        assert "thinwire.attach(prepared_model" in told["DDP around wrap"]
        assert "nothing left to exchange" in told["DDP around local's model"]
        assert told["its own data"] == ([], 3)  # through the optimizer that a framework put around another
        (word,) = told["the same data"][0]
        assert "exactly the same change" in word


def test_a_python_reducer_is_refused():
    assert all("python reducer" in told for told in launch(2, "resume_cases:python_reducer", timeout=600))


def test_torchs_own_checkpoint_holds_all_ranks_and_who_leaves_it_behind_is_told_once(tmp_path):
    for told in launch(2, "resume_cases:resumes", folder=str(tmp_path), timeout=600):
        straight, whole, left = told["straight"], told["whole"], told["left behind"]
        assert torch.equal(straight[0], whole[0]) and straight[1] == whole[1]
        assert not straight[2] and not whole[2]
        assert not torch.equal(straight[0], left[0])
        assert len(left[2]) == 1 and "residual, up to 276 entries" in left[2][0]
