"""What the outbox carries on: notices to approvers and requesters, suspended people, moved departments; the
looks of all states.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import translation

from portal.accounts.models import User
from portal.kernel.clock import set_clock
from portal.notify.models import Notification
from portal.notify.texts import words_of
from portal.ops.services.outbox import outbox_deliver
from portal.web import states
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange, QuotaUsage
from quotas.services.approvals import open_step_of, step_decide
from quotas.services.delegations import delegation_create
from quotas.services.sweeps import approvals_sweep
from quotas.services.usage import quota_debit
from quotas.subscriptions import on_department_changed, on_user_suspended
from quotas.transitions import REQUEST_ARROWS, allowed
from tests.quotas import build

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
MEDIUM = {"gpus_per_node": 8, "duration_s": 24 * 3600}


@pytest.fixture
def house():
    return build.House()


def told(kind):
    return sorted(Notification.objects.filter(kind=kind).values_list("user__username", flat=True))


def test_the_asked_lead_and_the_deputy_are_told_once_then_reminded_once(house):
    with set_clock(T):
        deputy = build.user("deputy")
        delegation_create(
            acting_user=build.actor(house.chen),
            policy=build.policy(house.chen),
            deputy=deputy,
            ends_at=T + timedelta(days=9),
        )
        house.submit(**MEDIUM)
        outbox_deliver()
        outbox_deliver()
        assert told("quotas.step_opened") == ["chen", "deputy"]
    with set_clock(T + timedelta(hours=20)):
        for _ in range(2):
            approvals_sweep()
            outbox_deliver()
    assert told("quotas.step_opened") == ["chen", "chen", "deputy", "deputy"]


def test_the_requester_is_told_what_was_decided_in_their_language(house):
    made = house.submit(**MEDIUM)
    step_decide(
        acting_user=build.actor(house.chen),
        policy=build.policy(house.chen),
        step=open_step_of(made),
        decision="reject",
        comment="六月已满",
    )
    outbox_deliver()
    notice = Notification.objects.get(kind="quotas.decided")
    assert (notice.user, notice.url) == (house.lin, f"/requests/{made.uid}/")
    with translation.override("zh-hans"):
        words = words_of(notice)
    assert (words.title, words.body) == (f"{made.ref}：已拒绝", "六月已满")


def test_nobody_is_told_of_what_passes_by_itself(house):
    house.submit()
    outbox_deliver()
    assert not Notification.objects.filter(kind__startswith="quotas.").exists()


def test_asks_of_a_suspended_person_are_taken_back(house):
    rows = [house.submit(**MEDIUM), house.submit()]
    running = house.submit()
    CapacityRequest.objects.filter(pk=running.pk).update(state="allocated")
    payload = {"user": str(house.lin.uid)}
    on_user_suspended(payload)  # still active: nothing happens
    assert CapacityRequest.objects.filter(state="withdrawn").count() == 0
    User.objects.filter(pk=house.lin.pk).update(is_active=False)
    on_user_suspended(payload)
    on_user_suspended(payload)
    assert {r.pk for r in CapacityRequest.objects.filter(state="withdrawn", end_reason="suspended")} == {
        r.pk for r in rows
    }
    assert not ApprovalStep.objects.filter(state__in=["open", "waiting"]).exists()
    running.refresh_from_db()
    assert running.state == "allocated"


def test_a_moved_department_carries_its_use(house):
    quota_debit(department_id=house.video.pk, flavour_id=house.h800.pk, charge_milli=3000, interruptible=True)
    house.video.parent = house.other
    house.video.save()
    on_department_changed({})
    totals = {u.department.code: u.total for u in QuotaUsage.objects.select_related("department")}
    assert (totals["other"], totals["vision"], totals["video"]) == (3000, 0, 3000)


@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_P034_every_state_has_colour_icon_and_word_in_both_languages(language):
    with translation.override(language):
        for kind, values in (
            ("request", CapacityRequest.State.values),
            ("step", ApprovalStep.State.values),
            ("request", QuotaChange.State.values),
        ):
            for state in values:
                look = states.look(state, kind)
                assert look.icon != "nodata", state
                word = str(look.label)
                assert word
                assert language == "en" or not word.isascii(), (state, word)


def test_P034_every_state_can_be_reached_and_left():
    reached = {target for _sources, target in REQUEST_ARROWS.values() if target is not None} | {"draft"}
    assert reached == set(CapacityRequest.State.values)
    assert all(
        any(allowed(act, s) for act in REQUEST_ARROWS)
        for s in ("draft", "in_approval", "queued", "allocated")
    )
