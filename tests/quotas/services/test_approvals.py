"""Decisions: who may, who may not by any route, what follows, and two at once."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from portal.accounts.models import RoleBinding
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, DomainError, Invalid, Refused
from portal.ops.models import AuditEvent, Incident, OutboxEvent
from quotas.models import ApprovalPolicy, ApprovalStep, CapacityRequest
from quotas.services.approval_policy import policy_default_ensure, policy_publish
from quotas.services.approvals import open_step_of, request_consent, step_decide, steps_approve
from quotas.services.delegations import delegation_create, delegation_revoke
from quotas.services.sweeps import approvals_sweep
from tests.quotas import build
from tests.quotas.services.test_usage import race

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
BIG = {"gpus_per_node": 8, "duration_s": 48 * 3600}  # 6,144 a lead and finance
MEDIUM = {"gpus_per_node": 8, "duration_s": 24 * 3600}  # 3,072: a lead


@pytest.fixture
def house():
    return build.House()


def decide(who, request, decision="approve", **args):
    step = args.pop("step", None) or open_step_of(request)
    return step_decide(
        acting_user=build.actor(who, args.pop("via", "page")), policy=build.policy(who), step=step, decision=decision,
        **args,
    )  # fmt: skip


def state_of(request):
    request.refresh_from_db()
    return request.state


def test_step_after_step_to_the_queue(house):
    with set_clock(T):
        made = house.submit(**BIG)
        decide(house.chen, made, comment="within the plan")
    assert state_of(made) == "in_approval"
    assert open_step_of(made).role == "finance"
    with set_clock(T + timedelta(hours=1)):
        decide(house.sun, made)
    assert state_of(made) == "queued"
    assert made.queued_at == made.decided_at == T + timedelta(hours=1)
    decided = list(made.steps.order_by("position").values_list("decided_by__username", "state", "comment"))
    assert decided == [("chen", "approved", "within the plan"), ("sun", "approved", "")]
    assert list(made.events.order_by("id").values_list("kind", "actor_name")) == [
        ("submitted", "Lin Yue"), ("approved", "Chen Hao"), ("approved", "Sun Mei"), ("queued", "Sun Mei"),
    ]  # fmt: skip
    assert OutboxEvent.objects.filter(topic="quotas.step_opened").count() == 2
    assert AuditEvent.objects.filter(action="approval.approved", object_uid=made.uid).count() == 2


@pytest.mark.parametrize("decision", ["return", "reject"])
def test_return_and_reject_need_a_reason_and_close_all_steps(house, decision):
    made = house.submit(**BIG)
    with pytest.raises(Invalid) as error:
        decide(house.chen, made, decision, comment="  ")
    assert error.value.errors[0]["pointer"] == "comment"
    assert state_of(made) == "in_approval"
    decide(house.chen, made, decision, comment="too long")
    assert state_of(made) == f"{decision}ed"
    assert not made.steps.filter(state__in=["open", "waiting"]).exists()
    assert made.events.order_by("-id").first().text == "too long"
    with pytest.raises(DomainError):
        decide(house.chen, made)


@pytest.mark.parametrize("decision", ["approve", "change", "return", "reject"])
@pytest.mark.parametrize("via", ["page", "api", "token"])
def test_P036_the_requester_never_decides_by_page_api_or_token(house, decision, via):
    made = house.submit(house.chen, **MEDIUM)  # the requester is the department's lead himself
    assert open_step_of(made).department == house.vision  # so the lead above is asked
    before = AuditEvent.objects.count()
    for who in (house.chen,):
        build.role(who, "lead")
        build.role(who, "pool_admin")
        with pytest.raises(Refused) as error:
            decide(who, made, decision, comment="mine", changed={"gpus_per_node": 1}, via=via)
        assert error.value.code == "self_approval"
    assert state_of(made) == "in_approval"
    assert open_step_of(made).decided_by is None
    assert AuditEvent.objects.count() == before
    decide(house.wu, made)
    assert state_of(made) == "queued"


def test_P036_nor_does_a_delegate_of_the_requester(house):
    made = house.submit(house.chen, **MEDIUM)
    deputy = build.user("deputy", display_name="Deputy")
    args = {"acting_user": build.actor(house.chen), "policy": build.policy(house.chen)}
    delegation_create(**args, deputy=deputy, ends_at=datetime.now(UTC) + timedelta(days=3))
    with pytest.raises(Refused) as error:
        decide(deputy, made)
    assert error.value.code == "self_approval"
    assert state_of(made) == "in_approval"


def test_P036_and_a_requester_who_is_the_deputy_of_the_approver(house):
    made = house.submit(house.lin, **MEDIUM)
    args = {"acting_user": build.actor(house.chen), "policy": build.policy(house.chen)}
    delegation_create(**args, deputy=house.lin, ends_at=datetime.now(UTC) + timedelta(days=3))
    with pytest.raises(Refused) as error:
        decide(house.lin, made)
    assert error.value.code == "self_approval"


def test_P036_the_database_forbids_it_too(house):
    made = house.submit(**MEDIUM)
    step = open_step_of(made)
    for field in ("decided_by", "on_behalf_of"):
        values = {field: house.lin, "state": "approved", "decided_at": T}
        with pytest.raises(IntegrityError), transaction.atomic():
            ApprovalStep.objects.filter(pk=step.pk).update(**values)


def test_a_deputy_decides_in_time_and_only_then(house):
    made = house.submit(**MEDIUM)
    deputy = build.user("deputy", display_name="Deputy")
    args = {"acting_user": build.actor(house.chen), "policy": build.policy(house.chen)}
    moment = datetime.now(UTC)
    granted = delegation_create(
        **args, deputy=deputy, starts_at=moment + timedelta(hours=1), ends_at=moment + timedelta(days=1)
    )
    with pytest.raises(Refused):
        decide(deputy, made)
    with set_clock(moment + timedelta(hours=2)):
        done = decide(deputy, made)
    assert (done.decided_by, done.on_behalf_of) == (deputy, house.chen)
    other = house.submit(**MEDIUM)
    delegation_revoke(**args, delegation=granted)
    with set_clock(moment + timedelta(hours=3)), pytest.raises(Refused):
        decide(deputy, other)


def test_delegation_refuses_nonsense(house):
    args = {"acting_user": build.actor(house.chen), "policy": build.policy(house.chen)}
    later = datetime.now(UTC) + timedelta(days=1)
    for changes in (
        {"deputy": house.chen},
        {"ends_at": T},
        {"starts_at": later},
        {"ends_at": later + timedelta(days=400)},
    ):
        with pytest.raises(Invalid):
            delegation_create(**{**args, "deputy": house.lin, "ends_at": later, **changes})
    with pytest.raises(Refused):
        delegation_create(**args, deputy=house.lin, ends_at=later, principal=house.wu)


@pytest.mark.parametrize("who", ["lin", "sun", "he", "stranger"])
def test_others_may_not_decide(house, who):
    made = house.submit(house.chen, **MEDIUM) if who == "lin" else house.submit(**MEDIUM)
    with pytest.raises(Refused) as error:
        decide(getattr(house, who), made)
    assert error.value.code == "not_your_step"
    assert state_of(made) == "in_approval"


def test_a_lead_above_may_and_a_lead_beside_may_not(house):
    beside = build.user()
    build.role(beside, "lead", house.perception)
    with pytest.raises(Refused):
        decide(beside, house.submit(**MEDIUM))
    decide(house.wu, CapacityRequest.objects.get())
    assert CapacityRequest.objects.get().state == "queued"


def test_P037_the_only_lead_asks_and_the_level_above_decides(house):
    made = house.submit(house.wu, department="vision", **MEDIUM)
    step = open_step_of(made)
    assert (step.role, step.department) == ("pool_admin", None)
    RoleBinding.objects.filter(role="pool_admin").delete()
    with pytest.raises(Conflict) as error:
        house.submit(house.wu, department="vision", **MEDIUM)
    assert error.value.code == "no_approver"
    assert CapacityRequest.objects.count() == 1


def test_an_approver_who_lost_the_role_may_not_decide_an_open_page(house):
    made = house.submit(**MEDIUM)
    policy = build.policy(house.chen)
    step = open_step_of(made)
    RoleBinding.objects.filter(user=house.chen).update(valid_to=datetime.now(UTC))
    with pytest.raises(Refused):
        step_decide(acting_user=build.actor(house.chen), policy=policy, step=step, decision="approve")


def test_second_decision_is_told_who_was_first(house):
    made = house.submit(**MEDIUM)
    step = open_step_of(made)
    decide(house.chen, made)
    with pytest.raises(Conflict) as error:
        decide(house.wu, made, step=step)
    assert error.value.code == "already_decided"
    assert error.value.extra["decided_by"] == "Chen Hao"
    assert error.value.extra["state"] == "approved"


@pytest.mark.django_db(transaction=True)
def test_two_approvers_at_once_one_wins_and_the_other_gets_409():
    house = build.House()
    made = house.submit(**MEDIUM)
    step = open_step_of(made)
    people = [house.chen, house.wu]
    decisions = ["approve", "reject"]
    out = race(2, lambda n: decide(people[n], made, decisions[n], step=step, comment="x").state)
    errors = [x for x in out if isinstance(x, DomainError)]
    assert len(errors) == 1
    assert (errors[0].status, errors[0].code) == (409, "already_decided")
    winner = next(x for x in out if not isinstance(x, DomainError))
    assert state_of(made) == {"approved": "queued", "rejected": "rejected"}[winner]
    assert made.events.filter(kind__in=["approved", "rejected"]).count() == 1


def test_change_needs_consent_and_the_policy_is_asked_again(house):
    made = house.submit(**BIG)
    with set_clock(T):
        decide(house.chen, made, "change", changed={"gpus_per_node": 4}, comment="stays within the guarantee")
    assert state_of(made) == "needs_consent"
    assert made.gpus_per_node == 8
    assert made.consent_change["values"] == {"gpus_per_node": 4}
    assert made.consent_change["cost_at_most_micro"] == 4 * 48 * 16_000_000
    with pytest.raises(Conflict):
        decide(house.wu, made)
    with pytest.raises(Refused):
        request_consent(
            acting_user=build.actor(house.chen), policy=build.policy(house.chen), request=made, agree=True
        )
    request_consent(
        acting_user=build.actor(house.lin), policy=build.policy(house.lin), request=made, agree=True
    )
    assert state_of(made) == "queued"  # 3,072 need no finance step any more
    assert (made.gpus_per_node, made.charge_milli, made.consent_change) == (4, 4000, {})
    step = made.steps.get(role="lead", state="approved")
    assert (step.decided_by, step.changed_to) == (house.chen, {"gpus_per_node": 4})
    assert made.steps.get(role="finance").state == "skipped"


def test_declined_change_goes_back_to_the_approver(house):
    made = house.submit(**BIG)
    decide(house.chen, made, "change", changed={"duration_s": 24 * 3600}, comment="a day")
    request_consent(
        acting_user=build.actor(house.lin), policy=build.policy(house.lin), request=made, agree=False
    )
    assert state_of(made) == "in_approval"
    assert (made.duration_s, open_step_of(made).role) == (48 * 3600, "lead")
    decide(house.chen, made)
    assert open_step_of(made).role == "finance"


def test_a_change_may_touch_amounts_only_and_must_change_something(house):
    made = house.submit(**BIG)
    wrong = [
        ({"command": "rm"}, "command"),
        ({"gpus_per_node": 8}, "changed"),
        ({}, "changed"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"gpus_per_node": "x"}, "gpus_per_node"),
    ]
    for changed, field in wrong:
        with pytest.raises(Invalid) as error:
            decide(house.chen, made, "change", changed=changed, comment="c")
        assert error.value.errors[0]["pointer"] == field
    with pytest.raises(Invalid):
        decide(house.chen, made, "change", changed={"gpus_per_node": 4}, comment="")
    assert state_of(made) == "in_approval"


def test_unanswered_change_lapses_once(house):
    with set_clock(T):
        made = house.submit(**MEDIUM)
        decide(house.chen, made, "change", changed={"gpus_per_node": 4}, comment="less")
    with set_clock(T + timedelta(hours=23)):
        assert approvals_sweep()["lapsed"] == 0
    with set_clock(T + timedelta(hours=25)):
        assert approvals_sweep()["lapsed"] == 1
        assert approvals_sweep()["lapsed"] == 0
    assert state_of(made) == "in_approval"
    assert made.events.filter(kind="lapsed").count() == 1


def test_reminder_once_then_escalation_level_by_level(house):
    with set_clock(T):
        made = house.submit(**MEDIUM)
    with set_clock(T + timedelta(hours=17)):
        assert approvals_sweep() == {"reminded": 0, "escalated": 0, "lapsed": 0}
    with set_clock(T + timedelta(hours=18)):
        assert approvals_sweep()["reminded"] == 1
        assert approvals_sweep()["reminded"] == 0
    with set_clock(T + timedelta(hours=24)):
        assert approvals_sweep()["escalated"] == 1
        assert approvals_sweep()["escalated"] == 0
    step = open_step_of(made)
    assert (step.role, step.department, step.due_at) == ("lead", house.vision, T + timedelta(hours=48))
    with set_clock(T + timedelta(hours=49)):
        approvals_sweep()
    assert (open_step_of(made).role, open_step_of(made).department) == ("pool_admin", None)
    assert not Incident.objects.exists()
    with set_clock(T + timedelta(days=30)):  # also after a missed time: one level, one incident
        approvals_sweep()
    assert Incident.objects.get().kind == "approval_overdue"
    assert state_of(made) == "in_approval"
    assert made.events.filter(kind="escalated").count() == 3
    assert OutboxEvent.objects.filter(topic="quotas.step_opened", payload__cause="reminder").count() == 1


def test_bulk_has_a_result_a_row(house):
    rows = [house.submit(gpus_per_node=1, duration_s=24 * 3600) for _ in range(3)]
    own = house.submit(house.chen, gpus_per_node=1, duration_s=24 * 3600)
    decide(house.wu, rows[2])
    uids = [r.steps.get(position=1).uid for r in [*rows, own]]
    unknown = uuid.uuid4()
    out = steps_approve(
        acting_user=build.actor(house.chen),
        policy=build.policy(house.chen),
        step_uids=[*uids, unknown, uids[0]],
    )
    assert [(r.ok, r.code) for r in out] == [
        (True, ""), (True, ""), (False, "already_decided"), (False, "self_approval"), (False, "not_found"),
    ]  # fmt: skip
    assert [state_of(r) for r in rows] == ["queued"] * 3
    assert state_of(own) == "in_approval"


def test_bulk_refuses_mixed_and_large_shapes_as_a_whole(house):
    one = house.submit(gpus_per_node=1, duration_s=24 * 3600)
    two = house.submit(gpus_per_node=2, duration_s=24 * 3600)
    big = house.submit(**MEDIUM)
    args = {"acting_user": build.actor(house.chen), "policy": build.policy(house.chen)}
    for rows in ([one, two], [big], []):
        with pytest.raises(Invalid):
            steps_approve(**args, step_uids=[open_step_of(r).uid for r in rows])
    assert {r.state for r in CapacityRequest.objects.all()} == {"in_approval"}


def test_policy_versions(house):
    first = policy_default_ensure()
    assert policy_default_ensure().pk == first.pk
    args = {"acting_user": build.actor(house.zhao), "policy": build.policy(house.zhao)}
    second = policy_publish(
        **args, rules=[{"code": "all", "kind": "first", "steps": []}], base_version=first.pk
    )
    assert list(ApprovalPolicy.objects.order_by("id").values_list("active", flat=True)) == [False, True]
    assert house.submit(**BIG).policy_rule == "all"
    with pytest.raises(Conflict):
        policy_publish(**args, rules=[], base_version=first.pk)
    with pytest.raises(Invalid) as error:
        policy_publish(**args, rules=[{"code": "x", "when": [["colour", "eq", 1]]}], base_version=second.pk)
    assert error.value.errors[0]["pointer"] == "rules/0/when/0/0"
    with pytest.raises(Refused):
        policy_publish(acting_user=build.actor(house.chen), policy=build.policy(house.chen), rules=[])


def test_a_change_of_a_service_keeps_its_review_date(house):
    review = (datetime.now(UTC) + timedelta(days=60)).replace(microsecond=0)
    made = house.submit(is_service=True, review_at=review.isoformat(), replicas_max=2, work_class="inference")
    decide(house.chen, made, "change", changed={"gpus_per_node": 2}, comment="two each")
    args = {"acting_user": build.actor(house.lin), "policy": build.policy(house.lin), "request": made}
    request_consent(**args, agree=True)
    made.refresh_from_db()
    assert (made.review_at, made.gpus_per_node, made.charge_milli) == (review, 2, 4000)
    assert [(s.role, s.state) for s in made.steps.order_by("round", "position")][:1] == [("lead", "approved")]
    assert open_step_of(made).role == "pool_admin"
