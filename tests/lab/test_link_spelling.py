"""Links as they are written: read, spelled again, and refused with what is wrong and an example."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab import LabError
from thinwire.lab.run.links.spelling import Change, Link, read_link, spell_seconds
from thinwire.plan import Network, parse_seconds


@pytest.mark.parametrize(
    ("text", "timeline"),
    [
        ("100mbit", [Change(1e8, 1e8, 0, 0, 0, True)]),
        ("100mbit, 40ms, 0.1% loss", [Change(1e8, 1e8, 0.04, 0, 0.001, True)]),
        ("20mbit up 100mbit down, 30ms +- 5ms", [Change(2e7, 1e8, 0.03, 0.005, 0, True)]),
        ("1gbit, then 100mbit after 60s", [Change(1e9, 1e9, 0, 0, 0, True), Change(1e8, 1e8, 0, 0, 0, True, 60)]),
        (
            "100mbit, 40ms, then down after 30s, then 20mbit after 50s",
            [
                Change(1e8, 1e8, 0.04, 0, 0, True),
                Change(1e8, 1e8, 0.04, 0, 0, False, 30),
                Change(2e7, 2e7, 0.04, 0, 0, True, 50),
            ],
        ),
    ],
)
def test_a_link_is_read_and_spelled(text: str, timeline: list[Change]) -> None:
    link = Link.parse(text)
    assert link.timeline(0) == timeline
    assert repr(link) == text
    assert Link.parse(repr(link)) == link


def test_a_worker_has_what_is_its_own_and_shares_the_rest() -> None:
    link = Link.parse("20mbit up 100mbit down, 30ms, then down after 9s, then up after 12s; worker 3: 5mbit up, 300ms")
    assert [(now.up, now.works) for now in link.timeline(0)] == [(2e7, True), (2e7, False), (2e7, True)]
    assert [(now.up, now.rtt, now.works, now.after) for now in link.timeline(3)] == [
        (5e6, 0.3, True, 0),
        (5e6, 0.3, False, 9),
        (5e6, 0.3, True, 12),
    ]
    assert link.network(3) == Network(2e7, 3, 0.03)
    assert link.network(4) == Network(5e6, 4, 0.3)
    with pytest.raises(LabError, match="workers are 0 to 2"):
        link.check(3)
    assert link.check(4) is link


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("100mbit", True),
        ("20mbit up 100mbit down; worker 1: 5mbit up", True),
        ("100mbit, 0ms, 0% loss", True),
        ("100mbit, 40ms", False),
        ("100mbit, 1% loss", False),
        ("100mbit; worker 1: 40ms", False),
        ("1gbit, then 100mbit after 60s", False),
        ("1gbit; worker 1: 1gbit, then down after 2s", False),
    ],
)
def test_only_a_rate_is_plain(text: str, plain: bool) -> None:
    assert Link.parse(text).plain is plain


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "nothing is said"),
        ("40ms", "a rate is missing"),
        ("20mbit up, 40ms", "a rate is missing"),
        ("fast", "no rate, no round trip and no loss"),
        ("100mbit, 40", "no rate, no round trip and no loss"),
        ("0mbit", "no link rate"),
        ("1.2.3mbit", "no link rate"),
        ("100mbit, 10mbit", "says again"),
        ("100mbit 5mbit up", "twice"),
        ("100mbit, 100% loss", "is down"),
        ("100mbit, 4ms +- 5ms", "longer than the round trip"),
        ("100mbit, then 10mbit", "does not say when"),
        ("100mbit, then 10mbit after 9s, then 20mbit after 3s", "order of their times"),
        ("100mbit; 5mbit", "comes a worker"),
        ("worker 1: 5mbit", "comes first"),
        ("100mbit; worker 1: 5mbit; worker 1: 6mbit", "twice"),
    ],
)
def test_what_is_wrong_is_said_with_an_example(text: str, what: str) -> None:
    with pytest.raises(LabError, match=what) as told:
        Link.parse(text)
    assert "100mbit, 40ms, 0.1% loss" in str(told.value) and "\n" not in str(told.value)


def test_a_round_trip_of_its_own_option_becomes_part_of_the_link() -> None:
    assert repr(read_link("100mbit; worker 1: 5mbit", "20ms")) == "100mbit, 20ms; worker 1: 5mbit"
    assert repr(read_link("100mbit", None)) == "100mbit"
    assert read_link(None, None) is None
    with pytest.raises(LabError, match="--rtt needs a --link"):
        read_link(None, "20ms")
    with pytest.raises(LabError, match="no time"):
        read_link("100mbit", "soon")


rates = st.integers(1, 10**7).map(lambda kbit: kbit * 1e3)
times = st.integers(0, 10**6).map(lambda us: us / 1e6)
changes = st.builds(
    Change,
    up=st.none() | rates,
    down=st.none() | rates,
    rtt=st.none() | times,
    loss=st.none() | st.integers(0, 999).map(lambda tenths: tenths / 1000),
    works=st.none() | st.booleans(),
)


@st.composite
def timelines(draw: st.DrawFn, first: bool) -> tuple[Change, ...]:
    told = [one for one in draw(st.lists(changes, max_size=3)) if one != Change()]
    if first or not told:
        told.insert(0, Change(draw(rates), draw(rates)))
    at = sorted(draw(st.sets(st.integers(1, 999), min_size=len(told) - 1, max_size=len(told) - 1)))
    placed = [replace(one, after=float(after)) for one, after in zip(told, [0, *at])]
    return tuple(replace(one, jitter=None if one.rtt is None else 0.0) for one in placed)


@given(timelines(True), st.dictionaries(st.integers(0, 9), timelines(False), max_size=2))
def test_every_link_is_read_as_it_was_spelled(common: tuple[Change, ...], apart: dict[int, tuple[Change, ...]]) -> None:
    text = repr(Link(common, tuple(sorted(apart.items()))))
    link = Link.parse(text)
    assert repr(link) == text
    assert Link.parse(repr(link)) == link
    for worker in range(10):
        for now, wanted in zip(link.timeline(worker), Link(common, tuple(sorted(apart.items()))).timeline(worker)):
            for name in ("up", "down", "rtt", "loss"):
                assert getattr(now, name) == pytest.approx(getattr(wanted, name))


@given(times)
def test_a_time_is_read_as_it_was_spelled(seconds: float) -> None:
    assert parse_seconds(spell_seconds(seconds)) == pytest.approx(seconds)
