"""What ExDyna's workers remember, and what they tell one another in a step."""

from dataclasses import dataclass, field

from torch import Tensor

from thinwire.core import memory
from thinwire.exchange import MessageRoom
from thinwire.methods.exdyna.thresholds import Control


@dataclass
class ExDynaState:
    numel: int = memory.derived()
    target: int = memory.derived()  # k: how many entries should be sent, at the density of the last step
    control: Control = field(default_factory=Control)
    room: MessageRoom = field(default_factory=MessageRoom)
    step: int = memory.per_world(int)
    shares: list[int] = memory.per_world(list)  # blocks of each partition
    loads: list[float] = memory.per_world(list)  # smoothed picks of each partition, or of each block
    fullest: float = memory.per_world(float)  # picks to expect in the fullest partition; 0: nothing is known
    picks: list[int] = memory.per_world(list)  # what each worker sent at the last step
    moved: int = memory.per_world(int)  # blocks that changed hands after the last step


@dataclass(frozen=True)
class Report:
    """What one worker tells the others about its partition."""

    above: int
    far_above: int
    measured: float
    index: Tensor
