"""What the server that forks workers imports, once: all that is public, the lab's workers, and warm kernels."""

import sklearn.datasets  # from which the examples take the digits: it takes as long as torch
import torch
import torch._dynamo  # which every first step of an optimizer imports
import torch.nn.parallel
import torch.profiler

import thinwire
import thinwire.lab.run.probe
import thinwire.lab.run.rehearsal
import thinwire.lab.run.worker
import thinwire.lab.tasks.digits
from thinwire import kernels

torch.set_num_threads(1)
sklearn.datasets.load_digits()  # and it imports more than its name says
for name in thinwire.__all__:
    getattr(thinwire, name)  # some are imported when they are asked for
for dtype in (torch.float32, torch.float64):
    kernels.warm(dtype)
