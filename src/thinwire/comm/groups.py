"""A process group for thinwire alone, so that nobody's collectives interleave with its own."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

_COUNT = 0  # groups made so far, on ranks of some but not all


class Members:
    """The group that messages go through: None is torch's default one.

    Once it is left, whoever still wants to send through it hears so. A thread that is in the middle of an exchange when
    another one gives it up must not go on in the next group, nor in the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.left = False
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        group = self._group  # before the question, since it is taken away after the answer
        if self.left:
            raise RuntimeError("this exchange was given up, because a part of it has failed on this worker")
        return group

    def leave(self) -> None:
        """Close the connections, so that whoever waits hears of it; that takes the last reference to the group."""
        self.left = True
        group, self._group = self._group, None
        dist.destroy_process_group(group)

    def meet_in(self, group: dist.ProcessGroup) -> None:
        self._group, self.left = group, False


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the same ranks, with the same patience."""
    if dist.get_world_size(group) == dist.get_world_size():
        return dist.new_group(timeout=_timeout(group))
    ranks = dist.get_process_group_ranks(group)
    # torch names such a group by how many groups its ranks know, which may differ from rank to rank, and may have been
    # used before. So they agree on a number that is new to all of them.
    global _COUNT
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    most = torch.tensor([_COUNT + 1], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    _COUNT = int(most)
    name = f"thinwire-{'-'.join(map(str, ranks))}-{_COUNT}"
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", return_value=name):
        return dist.new_group(ranks, timeout=_timeout(group), use_local_synchronization=True)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long the user lets `group` wait; torch has no public way to ask."""
    for name in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(name)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
