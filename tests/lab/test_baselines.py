"""What a user would pick instead of thinwire, in the lab."""

import torch

from processes import launch


def test_torchs_powersgd_hook_does_not_hang_on_a_model_of_several_buckets():
    one, other = launch(2, "baseline_cases:trained", method="DDP('powersgd')", timeout=60)
    assert torch.equal(one, other)
