"""Adapters for frameworks that build the DDP model themselves: Lightning, Fabric, Accelerate, Hugging Face's Trainer.

Each module needs its framework and is imported only by whoever uses it. An adapter calls the doors and nothing deeper:
it hands them the framework's model, scaler and optimizers, and keeps thinwire's state with the framework's checkpoints.
"""

from typing import Final

DEFAULT: Final = "Cast(Dense())"  # safe with every optimizer: docs/frameworks.md says what else was measured, and how
