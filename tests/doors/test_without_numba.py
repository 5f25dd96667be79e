"""Without numba the plain twins serve, and one warning says so."""

import subprocess
import sys

SCRIPT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "numba" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import torch, torch.distributed as dist, thinwire
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = thinwire.wrap(torch.nn.Linear(20, 20), thinwire.ErrorFeedback(thinwire.TopK(0.05)))
for _ in range(4):
    model(torch.randn(4, 20)).square().mean().backward()
print("trained", "numba" in sys.modules)
"""


def test_a_model_trains_without_numba():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert "trained False" in done.stdout, done.stderr
    assert done.stderr.count("numba is not installed") == 1
