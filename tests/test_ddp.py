import pytest
import torch

from processes import launch


@pytest.mark.parametrize("world", [1, 2])
def test_dense_is_ddp_to_the_bit(world):
    for bucket_count, grain in ((1, None), (6, None), (6, "model"), (2, "tensor")):
        for plain, ours in launch(
            world, "ddp_cases:dense_equals_ddp", steps=20, bucket_count=bucket_count, grain=grain
        ):
            assert torch.equal(plain, ours)
