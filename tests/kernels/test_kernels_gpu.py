"""The Triton kernels against the reference, through Triton's interpreter, in a process that knows of it from the start.

TRITON_INTERPRET=1 THINWIRE_KERNELS=gpu python tests/kernels/test_kernels_gpu.py    # what that process does
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KERNELS = ["select", "variance_step", "pack_signs", "fill_sparse"]


@pytest.fixture(scope="module")
def outcome() -> dict[str, list[str]]:
    """For each kernel, what went wrong."""
    pytest.importorskip("triton", reason="triton is not installed: its interpreter runs the GPU kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "THINWIRE_KERNELS": "gpu"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_its_reference(outcome: dict[str, list[str]], kernel: str) -> None:
    assert outcome[kernel] == []


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from test_kernels import identical, vector
    from torch import Tensor

    from thinwire import kernels
    from thinwire.kernels import gpu, reference

    wrong: dict[str, list[str]] = {kernel: [] for kernel in KERNELS}

    def compare(name: str, case: str, *inputs: Any) -> None:
        def run(work: Callable[..., Any]) -> tuple[Any, list[Any]]:
            mine = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
            return work(*mine), mine

        assert getattr(kernels._module("gpu"), name) is getattr(gpu, name)
        if not identical(run(getattr(reference, name)), run(getattr(kernels, name))):
            wrong[name].append(case)

    for dtype in (torch.float32, torch.float64):
        for n in (0, 1, 31, 1023, 1024, 1025, 2500):
            for kind in ("normal", "wild"):
                case = f"{kind} {n} {dtype}"
                x, y = vector(kind, n, dtype), vector("normal", n, dtype, seed=1)
                for threshold in (0.5, 2.5, float("inf"), float("nan")):
                    compare("select", case, x, threshold)
                    compare("select", case, x, threshold, n // 3, n - n // 5)
                compare("variance_step", case, y, x.square(), x, y.square(), 1.7, 0.999)
                compare("pack_signs", case, x)
                index = torch.arange(0, n, 3)
                parts = [(index, y[: len(index)]), (index.int(), x[: len(index)]), (index[:0], y[:0])]
                compare("fill_sparse", case, x, parts, 1 / 3)
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
