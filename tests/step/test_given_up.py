"""A step that one thread gives up while another is in the middle of it: nothing of it stays, nobody waits."""

import pytest
import torch

from given_up_cases import given_up
from processes import launch
from thinwire.comm.threads import in_threads


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("among", ["threads", "processes"])
def test_a_reduction_beside_the_thread_that_gives_up_leaves_nothing_behind(among: str, world: int) -> None:
    """It must not go on in another group, nor write a state that was put back already."""
    if among == "threads":
        told = in_threads(world, given_up)
    else:
        told = launch(world, "given_up_cases:given_up_among_processes")
    for before, after, error, mean in told:
        assert torch.equal(before, after)
        assert error in ("RuntimeError", "BrokenBarrierError")
        assert torch.equal(mean, told[0][3]) and bool(mean.any())
