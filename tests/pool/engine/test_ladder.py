"""The ladder's arithmetic: rules within their bounds, times of steps, what is due, whom surplus and idleness touch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.engine.ladder import (
    NO_HOOK,
    CaseFacts,
    Holder,
    Hook,
    RuleError,
    Rules,
    hook_of,
    idle_within_borrowed,
    next_act,
    rules_of,
    surplus_victims,
    times,
)

RULES = Rules()


def test_rules_have_defaults_and_unknown_names_are_left_aside():
    assert rules_of({}) == RULES
    assert rules_of({"grace_idle_s": 60, "of_another_version": 1}) == Rules(grace_idle_s=60)


@pytest.mark.parametrize(
    ("name", "value"),
    [("idle_window_s", 5), ("grace_preempted_s", -1), ("still_needed_times", "3"), ("checkpoint_s", True),
     ("idle_everybody", 1), ("evictions_alert", 0)],
)  # fmt: skip
def test_a_value_out_of_its_bounds_is_named(name, value):
    with pytest.raises(RuleError) as refused:
        rules_of({name: value})
    assert refused.value.name == name


def test_the_hook_of_a_request():
    assert hook_of({}, RULES) == hook_of(None, RULES) == NO_HOOK
    assert hook_of({"seconds": 60}, RULES) == NO_HOOK
    assert hook_of({"signal": "SIGUSR1"}, RULES) == Hook("signal", 30)
    assert hook_of({"signal": "SIGUSR1", "command": "save", "seconds": 90}, RULES) == Hook("command", 90)
    assert hook_of({"url": "https://x", "command": "save", "seconds": 10**9}, RULES) == Hook("url", 3600)
    assert hook_of({"command": "save", "seconds": "soon"}, RULES) == Hook("command", 30)
    assert hook_of({"command": "save", "seconds": 0}, RULES) == Hook("command", 1)


def test_the_hook_is_called_as_late_as_the_grace_allows():
    assert (times(at=0, grace_s=600, hook=Hook("command", 120)).hook_at) == 480_000
    short = times(at=1000, grace_s=10, hook=Hook("signal", 300))
    assert (short.hook_at, short.stop_at) == (1000, 301_000)
    assert times(at=0, grace_s=60, hook=NO_HOOK).stop_at == 60_000


def test_what_is_due():
    notice = CaseFacts("notice", "command", 480, 600)
    assert [next_act(notice, at) for at in (479, 480, 10**6)] == [None, "hook", "hook"]
    bare = CaseFacts("notice", "", 0, 600)
    assert [next_act(bare, at) for at in (0, 599, 600)] == [None, None, "stop"]
    asked = CaseFacts("checkpoint", "command", 480, 600)
    assert [next_act(asked, at) for at in (480, 599, 600)] == [None, None, "stop"]
    assert next_act(CaseFacts("checkpoint", "command", 480, 600, checkpoint_done=True), 481) == "stop"
    assert next_act(CaseFacts("stopping", "command", 480, 600), 10**9) is None


def test_idle_work_is_taken_longest_idle_first_as_far_as_it_is_borrowed():
    idle = [Holder(1, 2000, since=30), Holder(2, 1000, since=10), Holder(3, 4000, since=20)]
    assert idle_within_borrowed(idle, 0) == ()
    assert idle_within_borrowed(idle, 1000) == (2,)
    assert idle_within_borrowed(idle, 1500) == (2, 3)
    assert idle_within_borrowed(idle, 99_000) == (2, 3, 1)


holders = st.lists(
    st.builds(
        Holder,
        allocation_id=st.integers(1, 10**6),
        charge_milli=st.integers(1, 8000),
        since=st.integers(0, 1000),
        priority=st.integers(0, 100),
        interruptible=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.allocation_id,
)


@given(holders, st.integers(-1000, 40_000))
def test_a_surplus_takes_enough_and_not_one_more(running, over):
    chosen = surplus_victims(running, over)
    by_id = {one.allocation_id: one for one in running}
    soft = sum(one.charge_milli for one in running if one.interruptible)
    freed = sum(by_id[pk].charge_milli for pk in chosen)
    assert len(set(chosen)) == len(chosen)
    assert all(by_id[pk].interruptible for pk in chosen)
    assert freed >= min(soft, max(0, over))
    if soft >= over:
        assert all(freed - by_id[pk].charge_milli < over for pk in chosen)
    assert chosen == surplus_victims(list(reversed(running)), over)


def test_a_surplus_takes_the_least_important_and_newest_first():
    running = [
        Holder(1, 1000, since=10, priority=50), Holder(2, 1000, since=20, priority=50),
        Holder(3, 1000, since=5, priority=40), Holder(4, 1000, since=1, priority=10, interruptible=False),
    ]  # fmt: skip
    assert surplus_victims(running, 1000) == (3,)
    assert surplus_victims(running, 2000) == (3, 2)
