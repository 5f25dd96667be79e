"""Direct exchanges in real processes: whatever happens in a step, no message is ever taken for another.

A thousand steps of each: THINWIRE_RANDOM_STEPS=1000 pytest tests/doors/test_random_steps.py --timeout 3600
"""

import os

import pytest

from processes import launch

STEPS = int(os.environ.get("THINWIRE_RANDOM_STEPS", "60"))


# Messages of any length; such as go dense at times; two in a row.
@pytest.mark.parametrize(
    "method", ["ErrorFeedback(TopK(0.1))", "ErrorFeedback(Threshold(3.0))", "ErrorFeedback(ExDyna(0.05))"]
)
def test_random_steps_are_those_that_the_backend_takes(method: str) -> None:
    told = launch(3, "far_cases:random_steps", method=method, count=STEPS, timeout=150 + 3 * STEPS)
    assert all(one == told[0] for one in told)
    assert told[0]["wrong"] == [] and min(told[0]["counts"].values()) > 0
