"""Whoever wraps one model after the other, and lets them go with or without `detach`, leaves no connection open."""

import sys

import pytest

from processes import launch


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are counted in /proc")
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("spelling", ["ErrorFeedback(TopK(0.1))", "DAD(inputs='sent')", "local"])
def test_no_connection_outlives_its_model(spelling: str, detached: bool) -> None:
    for early, late in launch(2, "let_go_cases:open_files", spelling=spelling, detached=detached):
        assert late <= early
