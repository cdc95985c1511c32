"""Requests up to the queue: what is accepted, what is refused with which words, and what is written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from portal.kernel.clock import set_clock
from portal.kernel.errors import Blocked, Conflict, Invalid, Refused
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import CapacityRequest, UserLimit
from quotas.services.capacity import capacity_write
from quotas.services.requests import (
    request_change,
    request_clone,
    request_save_draft,
    request_submit,
    request_withdraw,
)
from quotas.services.usage import quota_debit
from quotas.transitions import REQUEST_ARROWS, REQUEST_TERMINAL, allowed
from tests.quotas import build
from tests.quotas.services.test_usage import race

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)


@pytest.fixture
def house():
    return build.House()


def problems(error):
    return {p["pointer"]: str(p["detail"]) for p in error.value.errors}


def submit(house, who=None, **changes):
    return house.submit(who, **changes)


def test_small_ask_within_the_guarantee_needs_nobody(house):
    with set_clock(T):
        made = submit(house, gpus_per_node=4, duration_s=12 * 3600)
    assert (made.state, made.queued_at, made.submitted_at) == ("queued", T, T)
    assert (made.charge_milli, made.cost_at_most_micro) == (4000, 4 * 12 * 16_000_000)
    assert (made.policy_rule, made.over_quota, made.steps.count()) == ("small-within-guarantee", False, 0)
    assert list(made.events.order_by("id").values_list("kind", flat=True)) == ["submitted", "queued"]
    topics = list(OutboxEvent.objects.order_by("id").values_list("topic", flat=True))
    assert topics == ["quotas.request_submitted", "quotas.request_queued", "quotas.request_decided"]
    assert AuditEvent.objects.filter(action="request.submitted", object_uid=made.uid).count() == 1


def test_above_the_guarantee_the_lead_decides_and_dear_asks_finance_too(house):
    quota_debit(
        department_id=house.video.pk, flavour_id=house.h800.pk, charge_milli=22_000, interruptible=True
    )
    with set_clock(T):
        made = submit(house, gpus_per_node=8, duration_s=96 * 3600)
    assert (made.state, made.over_quota) == ("in_approval", True)
    assert made.policy_rule == "borrows, cost-5000"
    assert made.cost_at_most_micro == 8 * 96 * 16_000_000
    steps = list(made.steps.order_by("position").values_list("role", "department__code", "state", "due_at"))
    assert steps == [
        ("lead", "video", "open", T + timedelta(hours=24)),
        ("finance", None, "waiting", None),
    ]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node", "The minimum is 1."),
        ({"gpus_per_node": -4}, "gpus_per_node", "The minimum is 1."),
        ({"gpus_per_node": "-4"}, "gpus_per_node", "The minimum is 1."),
        ({"gpus_per_node": 1.5}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": "1.5"}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": "many"}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": True}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": [1]}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": "9" * 40}, "gpus_per_node", "A whole number is needed here, for example 1."),
        ({"gpus_per_node": 10**15}, "gpus_per_node", "The maximum is 2000000000."),
        ({"gpus_per_node": 9}, "gpus_per_node", "A node of this flavour has 8. Ask for more nodes instead."),
        ({"gpus_per_node": 8, "nodes": 25}, "nodes", "The pool maximum is 192: so many H800 80GB are installed."),
        ({"nodes": 0}, "nodes", "The minimum is 1."),
        ({"department": "nowhere"}, "department", "There is no such department, or you may not ask on its behalf."),
        ({"department": "other"}, "department", "There is no such department, or you may not ask on its behalf."),
        ({"flavour": "h900"}, "flavour", "There is no such flavour on offer."),
        ({"flavour": ""}, "flavour", "Choose a flavour, or say what the work needs."),
        ({"duration_s": ""}, "duration_s", "How long is it needed? Only a service has no end."),
        ({"duration_s": 59}, "duration_s", "The minimum is 60."),
        ({"duration_s": 400 * 86400}, "duration_s", "The maximum is 31622400."),
        ({"purpose": " "}, "purpose", "Say in a sentence what it is for: approvers read this."),
        ({"command": ""}, "command", "Say what to run, or choose a hold."),
        ({"command": "a\x00b"}, "command", "This text has a sign in it that cannot be stored."),
        ({"run_kind": "image"}, "image", "Name the container image."),
        ({"shape": "slices"}, "shape", "Choose one of: whole, fraction, mig, cpu."),
        ({"shape": "mig", "mig_profile": "1g.10gb"}, "mig_profile", "H800 80GB has no MIG profile 1g.10gb."),
        ({"shape": "fraction"}, "fraction_milli",
         "Say how much of a GPU: a share of compute, MiB of memory, or both."),
        ({"shape": "fraction", "fraction_milli": 1001}, "fraction_milli", "The maximum is 1000."),
        ({"shape": "fraction", "fraction_mib": 90_000}, "fraction_mib", "A card has 81920 MiB."),
        ({"shape": "cpu"}, "shape", "Leases without a GPU are offered in the demonstration only."),
        ({"start_at": "2020-01-01T00:00:00Z"}, "start_at", "This start lies in the past."),
        ({"start_at": "2020-01-01T00:00"}, "start_at", "The time needs its zone, for example +08:00."),
        ({"start_at": "tomorrow"}, "start_at",
         "A date and time with its zone is needed here, for example 2026-06-17T09:00+08:00."),
        ({"is_service": True}, "review_at",
         "A service has no end but a review date: you renew it by then or it stops."),
        ({"priority": 101}, "priority", "The maximum is 100."),
        ({"interruptible": "perhaps"}, "interruptible", "Yes or no is needed here."),
        ({"cuda_min": "new"}, "cuda_min", "A CUDA version is needed here, for example 12.4."),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment", "CUDA_VISIBLE_DEVICES cannot be set."),
        ({"environment": {"A B": "0"}}, "environment", "A B cannot be set."),
        ({"environment": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}}, "environment", "CUDA_MPS_PIPE_DIRECTORY cannot be set."),
        ({"environment": {"GPUPOOL_JOB": "x/0"}}, "environment", "GPUPOOL_JOB cannot be set."),
        (
            {"run_kind": "image", "image": "--privileged"},
            "image",
            "An image name begins with a letter or digit; it has letters, digits and . _ / @ : - only.",
        ),
        ({"flavour": "", "requirement": {"memory_mib": 300_000}}, "requirement",
         "No flavour on offer meets all of this. Ask for less memory or fewer features."),
        ({"flavour": "", "requirement": {"memory_mib": "much"}}, "requirement",
         "A whole number is needed here, for example 1."),
        ({"flavour": "", "requirement": {"colour": "red"}}, "requirement", "Unknown: colour."),
    ],
)  # fmt: skip
def test_P025_wrong_fields_are_told_beside_the_field_and_nothing_is_written(house, changes, field, words):
    with pytest.raises(Invalid) as error:
        submit(house, **changes)
    assert problems(error)[field] == words
    assert error.value.code == "invalid"
    assert not CapacityRequest.objects.exists()
    assert not OutboxEvent.objects.exists()
    assert not AuditEvent.objects.filter(action__startswith="request.").exists()


def test_several_problems_come_at_once(house):
    with pytest.raises(Invalid) as error:
        submit(house, gpus_per_node=0, purpose="", duration_s=1)
    assert set(problems(error)) == {"gpus_per_node", "purpose", "duration_s"}


def test_P026_more_than_the_pool_has_and_more_than_the_quota_lets_are_two_answers():
    house = build.House(installed=16)
    with pytest.raises(Invalid) as error:
        submit(house, gpus_per_node=8, nodes=3)
    assert problems(error) == {"nodes": "The pool maximum is 16: so many H800 80GB are installed."}
    with pytest.raises(Invalid) as error:
        submit(house, gpus_per_node=24)
    assert problems(error) == {"gpus_per_node": "The pool maximum is 16: so many H800 80GB are installed."}
    build.limits(house.video, house.h800, 4, hard_cap=8)
    with pytest.raises(Blocked) as blocked:
        submit(house, gpus_per_node=5, nodes=2)
    assert blocked.value.code == "never_fits"
    assert blocked.value.blocking == {"level": "Video", "limit": 8000, "used": 0, "requested": 10_000}
    assert str(blocked.value.detail) == "Video: 0 used + 10 asked > 8, its hard cap for H800 80GB."


def test_over_the_hard_cap_now_is_refused_with_the_sum(house):
    quota_debit(
        department_id=house.video.pk, flavour_id=house.h800.pk, charge_milli=22_000, interruptible=True
    )
    with pytest.raises(Blocked) as error:
        submit(house, gpus_per_node=8, nodes=2)
    assert error.value.blocking == {"level": "Video", "limit": 32_000, "used": 22_000, "requested": 16_000}
    assert not CapacityRequest.objects.exists()


def test_uninterruptible_work_above_the_guarantee_can_never_start(house):
    with pytest.raises(Blocked) as error:
        submit(house, gpus_per_node=7, nodes=4, interruptible=False)
    assert error.value.blocking == {"level": "Video", "limit": 24_000, "used": 0, "requested": 28_000}
    assert "allow interruption" in str(error.value.detail)


def test_a_driver_too_old_is_said_at_request_time(house):
    capacity_write(
        flavour_id=house.h800.pk,
        installed_milli=192_000,
        healthy_milli=192_000,
        largest_node_gpus=8,
        cuda_max="12.4",
    )
    assert submit(house, cuda_min="12.4").state == "queued"
    with pytest.raises(Invalid) as error:
        submit(house, cuda_min="12.6")
    assert problems(error) == {
        "cuda_min": "The drivers on nodes of H800 80GB run CUDA up to 12.4; 12.6 is asked."
    }


def test_fraction_is_charged_its_larger_share(house):
    l40s = build.flavour("l40s", installed=16, name="L40S 48GB", memory_mib=46_068)
    build.limits(house.video, l40s, 12)
    made = submit(house, flavour="l40s", shape="fraction", fraction_milli=300, fraction_mib=12_288)
    assert made.charge_milli == 300
    made = submit(house, flavour="l40s", shape="fraction", fraction_milli=200, fraction_mib=12_288)
    assert made.charge_milli == 266
    made = submit(house, flavour="l40s", shape="fraction", fraction_milli=300, gpus_per_node=3)
    assert made.charge_milli == 900  # P018: three workers of 0.3 are 0.9, never 0.8999


def test_mig_is_charged_by_its_slices(house):
    a100 = build.flavour(
        "a100", installed=8, name="A100 80GB", mig_capable=True, mig_table="A100-80GB", compute_slices=7
    )
    build.limits(house.video, a100, 8)
    made = submit(house, flavour="a100", shape="mig", mig_profile="2g.20gb", mig_count=3)
    assert (made.charge_milli, made.gpus_per_node) == (855, 1)
    with pytest.raises(Invalid) as error:
        submit(house, flavour="a100", shape="mig", mig_profile="2g.21gb", mig_count=3)
    assert problems(error) == {"mig_profile": "A100 80GB has no MIG profile 2g.21gb."}


def test_a_requirement_resolves_to_ordered_flavours_and_the_dearest_is_judged(house):
    h20 = build.flavour("h20", installed=64, name="H20 96GB", memory_mib=98_304, nvlink=True, fp8=True)
    build.limits(house.video, h20, 8)
    build.price(h20, 9)
    build.flavour("a30", installed=24, name="A30 24GB", memory_mib=24_576)
    made = submit(house, flavour="", requirement={"memory_mib": 40_960, "fp8": True, "nvlink": "yes"})
    assert made.flavour is None
    assert made.requirement == {"memory_mib": 40_960, "fp8": True, "nvlink": True}
    assert made.options == ["h20", "h800"]  # both within the guarantee: the cheaper first
    assert made.cost_at_most_micro == 16_000_000  # judged by the dearer


def test_a_service_has_a_review_date_and_needs_an_administrator(house):
    with set_clock(T):
        made = submit(
            house,
            is_service=True,
            review_at="2026-09-16T00:00:00+08:00",
            replicas_min=1,
            replicas_max=2,
            work_class="inference",
        )
    assert (made.duration_s, made.nodes, made.charge_milli) == (None, 2, 2000)
    assert list(made.steps.order_by("position").values_list("role", flat=True)) == [
        "lead",
        "pool_admin",
        "finance",
    ]


def test_a_window_is_kept(house):
    with set_clock(T):
        made = submit(house, start_at="2026-06-17T09:00:00+08:00")
    assert made.start_at == datetime(2026, 6, 17, 1, 0, tzinfo=UTC)


def test_a_command_with_quotes_newlines_and_chinese_is_kept_to_the_letter(house):
    command = "echo '一 \"two\"'\nprintf '%s\\n' \"$HOME\" && echo `date`"
    assert submit(house, command=command).command == command


def test_limits_of_a_person(house):
    UserLimit.objects.create(
        user=house.lin, gpus_at_once_milli=2000, longest_lease_s=7200, gpu_ms_per_month=7_200_000
    )
    with pytest.raises(Invalid) as error:
        submit(house, gpus_per_node=3)
    assert problems(error) == {"gpus_per_node": "Your limit is 2 GPUs at once."}
    with pytest.raises(Invalid) as error:
        submit(house, duration_s=7201)
    assert problems(error) == {"duration_s": "Longest lease here: 2 h."}
    with pytest.raises(Invalid) as error:
        submit(house, gpus_per_node=2, duration_s=7200)
    assert problems(error) == {"duration_s": "Your limit is 2 GPU-hours a month; this asks 4."}


def test_the_same_client_token_makes_one_request(house):
    args = {"acting_user": build.actor(house.lin), "policy": build.policy(house.lin), "client_token": "t-1"}
    first = request_submit(**args, values=house.ask())
    assert request_submit(**args, values=house.ask()).pk == first.pk
    with pytest.raises(Conflict) as error:
        request_submit(**args, values=house.ask(gpus_per_node=2))
    assert (error.value.code, error.value.extra) == ("sent_already", {"request": str(first.uid)})
    assert CapacityRequest.objects.count() == 1
    first.refresh_from_db()
    assert (first.state, first.gpus_per_node) == ("queued", 1)
    other = request_submit(
        acting_user=build.actor(house.chen),
        policy=build.policy(house.chen),
        client_token="t-1",
        values=house.ask(),
    )
    assert other.pk != first.pk


@pytest.mark.django_db(transaction=True)
def test_the_same_client_token_from_eight_threads_makes_one_request():
    house = build.House()

    def send(_n):
        return request_submit(
            acting_user=build.actor(house.lin),
            policy=build.policy(house.lin),
            client_token="t-1",
            values=house.ask(),
        ).pk

    out = race(8, send)
    assert len(set(out)) == 1
    assert CapacityRequest.objects.count() == 1


def test_draft_then_submit(house):
    args = {"acting_user": build.actor(house.lin), "policy": build.policy(house.lin)}
    draft = request_save_draft(**args, values={"gpus_per_node": 2})
    assert (draft.state, draft.department, draft.gpus_per_node) == ("draft", house.video, 2)
    draft = request_save_draft(**args, request=draft, values=house.ask(gpus_per_node=3, purpose=""))
    assert (draft.gpus_per_node, draft.flavour, draft.purpose) == (3, house.h800, "")
    with pytest.raises(Invalid):
        request_submit(**args, request=draft)
    draft.refresh_from_db()
    assert draft.state == "draft"
    sent = request_submit(**args, request=draft, values=house.ask(gpus_per_node=3))
    assert (sent.pk, sent.state, sent.charge_milli) == (draft.pk, "queued", 3000)
    with pytest.raises(Invalid):
        request_save_draft(**args, values={"gpus_per_node": 0})


def test_change_begins_a_new_round_and_keeps_both_in_history(house):
    made = submit(house, gpus_per_node=8, duration_s=48 * 3600)
    assert made.state == "in_approval"
    version = made.version
    args = {"acting_user": build.actor(house.lin), "policy": build.policy(house.lin), "request": made}
    changed = request_change(**args, values=house.ask(gpus_per_node=8, duration_s=24 * 3600), version=version)
    assert (changed.duration_s, changed.state) == (24 * 3600, "in_approval")
    assert list(changed.steps.order_by("id").values_list("round", "state")) == [
        (1, "skipped"), (1, "skipped"), (2, "open"),
    ]  # fmt: skip
    assert changed.events.get(kind="changed").facts["changed"] == {"duration_s": [172800, 86400]}
    with pytest.raises(Conflict) as error:
        request_change(**args, values=house.ask(), version=version)
    assert error.value.code == "version_changed"
    small = request_change(**args, values=house.ask())
    assert (small.state, small.steps.filter(state="open").count()) == ("queued", 0)


def test_only_the_requester_changes_or_submits(house):
    made = submit(house, gpus_per_node=8, duration_s=48 * 3600)
    for who in (house.chen, house.zhao, house.stranger):
        args = {"acting_user": build.actor(who), "policy": build.policy(who), "request": made}
        with pytest.raises(Refused):
            request_change(**args, values=house.ask())
    made.refresh_from_db()
    assert made.gpus_per_node == 8


def test_withdraw_takes_it_out_of_every_queue(house):
    made = submit(house, gpus_per_node=8, duration_s=48 * 3600)
    args = {"policy": build.policy(house.lin), "acting_user": build.actor(house.lin), "request": made}
    with pytest.raises(Refused):
        request_withdraw(acting_user=build.actor(house.chen), policy=build.policy(house.chen), request=made)
    gone = request_withdraw(**args, reason="not needed")
    assert (gone.state, gone.end_reason) == ("withdrawn", "withdrawn")
    assert not gone.steps.filter(state__in=["open", "waiting"]).exists()
    assert OutboxEvent.objects.filter(topic="quotas.request_withdrawn").count() == 1
    with pytest.raises(Conflict) as error:
        request_withdraw(**args)
    assert error.value.extra["possible"] == []


def test_clone_copies_the_wishes_into_a_draft(house):
    made = submit(
        house, gpus_per_node=8, nodes=2, duration_s=48 * 3600, environment={"A": "1"}, cost_code="VM-1"
    )
    copy = request_clone(acting_user=build.actor(house.lin), policy=build.policy(house.lin), request=made)
    assert (copy.state, copy.cloned_from, copy.client_token) == ("draft", made, "")
    for name in (
        "gpus_per_node",
        "nodes",
        "duration_s",
        "flavour",
        "environment",
        "cost_code",
        "command",
        "purpose",
    ):
        assert getattr(copy, name) == getattr(made, name), name


def test_P033_state_by_action_table_every_transition_and_every_refusal(house):
    """Each act of a person against each state: it either moves along its arrow or is refused and changes
    nothing.
    """
    acts = {
        "save": lambda r: request_save_draft(**who, request=r, values=house.ask()),
        "submit": lambda r: request_submit(**who, request=r, values=house.ask()),
        "change": lambda r: request_change(**who, request=r, values=house.ask()),
        "withdraw": lambda r: request_withdraw(**who, request=r),
    }
    who = {"acting_user": build.actor(house.lin), "policy": build.policy(house.lin)}
    for state in CapacityRequest.State.values:
        for act, do in acts.items():
            made = request_save_draft(**who, values=house.ask(gpus_per_node=2))
            CapacityRequest.objects.filter(pk=made.pk).update(state=state)
            made.refresh_from_db()
            if allowed(act, state):
                after = do(made)
                expected = {"save": state, "withdraw": "withdrawn"}.get(act, "queued")
                assert after.state == expected, (act, state)
                assert after.version > made.version
            else:
                with pytest.raises(Conflict) as error:
                    do(made)
                assert error.value.code == "wrong_state"
                again = CapacityRequest.objects.get(pk=made.pk)
                assert (again.state, again.version, again.gpus_per_node) == (state, made.version, 2), (
                    act,
                    state,
                )


def test_P034_every_state_has_a_way_on_or_is_terminal():
    for state in CapacityRequest.State.values:
        out = [act for act in REQUEST_ARROWS if allowed(act, state)]
        assert bool(out) != (state in REQUEST_TERMINAL), state


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ({"signal": "SIGKILL9"}, "A signal that a program can take is needed here, for example SIGUSR1."),
        ({"signal": "SIGKILL"}, "A signal that a program can take is needed here, for example SIGUSR1."),
        (
            {"url": "http://169.254.169.254/"},
            "This address is not a public one, nor one that an administrator allowed.",
        ),
        (
            {"url": "http://[::1]/x"},
            "This address is not a public one, nor one that an administrator allowed.",
        ),
        ({"url": "ftp://hooks.example/x"}, "An address of the form https://host/path is needed here."),
        ([], "A signal, command or URL, and the seconds it needs."),
    ],
)
def test_a_checkpoint_that_could_never_be_called_is_refused_when_it_is_asked_for(house, hook, told):
    with pytest.raises(Invalid) as error:
        submit(house, checkpoint=hook)
    assert problems(error) == {"checkpoint": told}
    assert CapacityRequest.objects.count() == 0


def test_a_checkpoint_address_inside_the_network_is_taken_where_it_is_allowed(house, settings):
    settings.GPUPOOL_HOOK_ALLOW = ["10.0.0.0/8"]
    made = submit(house, checkpoint={"url": "http://10.1.2.3:8000/x", "signal": "SIGUSR2"})
    assert made.checkpoint == {"url": "http://10.1.2.3:8000/x", "signal": "SIGUSR2", "seconds": 120}


def test_a_date_beyond_the_calendar_is_refused(house):
    with pytest.raises(Invalid) as error:
        submit(house, deadline_at="9999-12-31T23:59:59-14:00")
    assert problems(error) == {"deadline_at": "This date is out of range."}
    assert CapacityRequest.objects.count() == 0
