"""The demo's story is a plan that can be true: nobody twice on a card, and the fleet fills up."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta

from portal.demo import cast, fleet
from portal.demo.story import NEVER, story

ANCHOR = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)


def test_the_same_anchor_gives_the_same_story() -> None:
    assert story(ANCHOR) == story(ANCHOR)


def test_no_two_lives_overlap_on_a_card_and_all_end_before_now() -> None:
    by_card = defaultdict(list)
    for life in story(ANCHOR):
        assert life.submitted_at <= life.decided_at <= life.started_at < life.ended_at < ANCHOR
        assert life.started_at >= ANCHOR - timedelta(days=cast.DAYS, hours=1)
        for seat in life.seats:
            assert seat.card not in NEVER
            by_card[seat.node, seat.index, seat.start].append((life.started_at, life.ended_at))
    for spans in by_card.values():
        spans.sort()
        assert all(end <= start for (_s, end), (start, _e) in zip(spans, spans[1:], strict=False))


def test_use_rises_from_below_30_to_above_70_percent() -> None:
    lives = [life for life in story(ANCHOR) if life.shape == "whole"]
    cards = sum(count - len(split) for _s, _n, _m, count, split in fleet.LAYOUT)

    def use(first: int, last: int) -> float:
        begin, end = ANCHOR - timedelta(days=first), ANCHOR - timedelta(days=last)
        held = sum(
            max(timedelta(), min(life.ended_at, end) - max(life.started_at, begin))
            / timedelta(hours=1)
            * len(life.seats)
            for life in lives
        )
        return held / (cards * (first - last) * 24)

    assert use(90, 80) < 0.30
    assert use(15, 3) > 0.70


def test_the_fleet_is_what_the_issue_says() -> None:
    nodes = fleet.nodes()
    cards = [gpu for node in nodes for gpu in node["gpus"]]
    assert (len(nodes), len(cards)) == (12, 64)
    assert len({gpu["name"] for gpu in cards}) == 6
    assert len({node["site"] for node in nodes}) == 3
    assert len({gpu["uuid"] for gpu in cards}) == 64
    assert any(gpu["mig"]["enabled"] for gpu in cards)
    assert any(gpu["nvlink"] for gpu in cards)
