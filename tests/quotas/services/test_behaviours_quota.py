"""Behaviours drawn from public bug reports about quotas: their change, what is shown of them, and what is counted.
Each test names its id (behaviours.json).
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from portal.accounts.policy import policy_of
from portal.accounts.services import department_close, department_close_effects
from portal.kernel.errors import Blocked, Invalid
from portal.ops.models import AuditEvent, Incident
from quotas.models import FlavourCapacity, QuotaGrant, QuotaUsage
from quotas.selectors.trees import quota_trees
from quotas.services.grants import grant_set
from quotas.services.reconcile import reconcile
from quotas.services.requests import request_submit
from quotas.services.usage import quota_debit, quota_release
from tests.quotas import build

pytestmark = pytest.mark.django_db


@pytest.fixture
def house():
    return build.House()


def grant(house: Any, where: Any, gpus: int, **limits: Any) -> None:
    in_milli = {name: None if value is None else value * 1000 for name, value in limits.items()}
    grant_set(
        acting_user=build.actor(house.zhao), policy=policy_of(house.zhao), department=where, flavour=house.h800,
        guaranteed=gpus * 1000, **in_milli,
    )  # fmt: skip


def signed_in(user: Any, language: str = "en") -> Client:
    client = Client(headers={"accept-language": language})
    user.language = language
    user.save(update_fields=["language"])
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def text_of(client: Client, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200, address
    return unescape(answer.content.decode()).replace("\xa0", " ")


def test_p003_what_a_closed_department_owned_ends_in_the_same_transaction():
    """A and B own four of eight each, B lends nothing. Closing B lists its open work first, ends its quota with it,
    and A's six are above its own four: nobody approves them on what was B's."""
    house = build.House(installed=8)
    QuotaUsage.objects.all().delete()
    a, b = house.other, build.department("b", name="Bee")
    grant(house, a, 4, borrow_limit=4)
    grant(house, b, 4, lend_limit=0)
    lead = build.user("lead-a", a)
    build.role(lead, "lead", a)
    quota_debit(department_id=b.pk, flavour_id=house.h800.pk, charge_milli=1000, interruptible=True)
    tree = quota_trees([house.h800.pk])[house.h800.pk]
    assert (tree.subtree[0], tree.guarantee(b.pk)) == (4000, 4000)
    assert [(str(e.label), e.count) for e in department_close_effects(b)][3:] == [
        ("Requests that wait", 0), ("Open allocations", 0), ("Quotas that end", 1),
    ]  # fmt: skip
    department_close(acting_user=build.actor(house.zhao), department=b, reason="merged")
    row = QuotaUsage.objects.get(department=b)
    assert (row.granted, row.guaranteed, row.lend_limit, row.direct) == (False, 0, None, 1000)
    assert not QuotaGrant.objects.filter(department=b, during__upper_inf=True).exists()
    ended = AuditEvent.objects.get(action="quota.grant_ended")
    assert ended.before["grants"][0]["guaranteed"] == 4000
    tree = quota_trees([house.h800.pk])[house.h800.pk]
    assert (tree.subtree[0], tree.guarantee(b.pk)) == (8000, 0)
    asked = request_submit(
        acting_user=build.actor(house.stranger),
        policy=policy_of(house.stranger),
        values=house.ask(department=a.code, gpus_per_node=6),
    )
    assert (asked.state, [step.role for step in asked.steps.all()][:1]) == ("in_approval", ["lead"])
    with pytest.raises(Invalid):
        request_submit(
            acting_user=build.actor(house.zhao),
            policy=policy_of(house.zhao),
            values=house.ask(department=b.code),
        )


def test_p005_the_books_say_three_and_a_difference_is_told(house):
    """Two of three came back early, then all three are held again."""
    args = {"department_id": house.video.pk, "flavour_id": house.h800.pk, "interruptible": True}
    quota_debit(charge_milli=3000, **args)
    quota_release(charge_milli=2000, **args)
    quota_debit(charge_milli=2000, **args)
    usage = QuotaUsage.objects.get(department=house.video)
    assert (usage.direct, usage.total) == (3000, 3000)
    found = reconcile()  # no lease holds them: three are told as a difference, and nothing is mended
    assert {d["department"]: (d["counter_milli"], d["leases_milli"]) for d in found.counter_differences} == {
        "video": (3000, 0), "vision": (3000, 0),
    }  # fmt: skip
    usage.refresh_from_db()
    assert (usage.direct, Incident.objects.get(kind="counters_differ").severity) == (3000, "critical")


def test_p008_memory_is_charged_per_card_and_a_refusal_carries_its_sum(house):
    """One card of 80 GiB is the whole quota: two shares of 40 GiB fill it, three are refused with the sum."""
    lab = build.department("lab", name="Lab")
    who = build.user(home=lab)
    build.role(who, "researcher", lab)
    build.limits(lab, house.h800, 1, hard_cap=1)
    shares = {"shape": "fraction", "fraction_mib": 40 * 1024, "fraction_milli": "", "department": lab.code}

    def ask(count: int) -> Any:
        values = house.ask(**shares, gpus_per_node=count)
        return request_submit(acting_user=build.actor(who), policy=policy_of(who), values=values)

    assert ask(2).charge_milli == 1000
    with pytest.raises(Blocked) as refused:
        ask(3)
    sums = refused.value.blocking
    assert (sums["level"], sums["limit"], sums["used"], sums["requested"]) == ("Lab", 1000, 0, 1500)
    assert str(refused.value.detail) == "Lab: 0 used + 1.5 asked > 1, its hard cap for H800 80GB."


def test_p023_three_numbers_of_capacity_stand_apart(house):
    """300 installed, 280 healthy, 100 in use."""
    FlavourCapacity.objects.filter(flavour=house.h800).update(installed_milli=300_000, healthy_milli=280_000)
    QuotaUsage.objects.filter(department=house.video).update(hard_cap=None)
    QuotaUsage.objects.filter(department=house.vision).update(hard_cap=None)
    quota_debit(
        department_id=house.video.pk, flavour_id=house.h800.pk, charge_milli=100_000, interruptible=True
    )
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text_of(signed_in(house.zhao), "/quotas/?f=h800")))
    assert "Installed 300 280 healthy" in page
    assert "Used 100 of 300 installed, now" in page


def test_p014_p017_the_same_number_stands_on_every_page_in_files_and_the_api(house):
    """0.5, 0.25 and 0.25 are exactly 1 wherever the department's use is shown; three of 0.3 are 0.9."""
    args = {"flavour_id": house.h800.pk, "interruptible": True}
    for share in (500, 250, 250):
        quota_debit(department_id=house.video.pk, charge_milli=share, **args)
    for _ in range(3):
        quota_debit(department_id=house.perception.pk, charge_milli=300, **args)
    client = APIClient()
    client.force_login(house.zhao, backend="django.contrib.auth.backends.ModelBackend")
    answer = client.get("/api/v1/quotas/?flavour=h800").json()
    used = {row["department"]: row["used_milli"] for row in answer["results"]}
    assert (used["video"], used["perception"], used["vision"]) == (1000, 900, 1900)
    bars = {
        "Video: 1 used of 24 guaranteed; 0 borrowed; 0 lent; limit 32": (house.zhao, house.wu, house.chen),
        "Perception: 0.9 used of 16 guaranteed; 0 borrowed; 0 lent; limit 24": (house.zhao, house.wu),
        "Vision: 1.9 used of 40 guaranteed; 0 borrowed; 0 lent; limit 56": (house.zhao, house.wu, house.chen),
    }
    for bar, readers in bars.items():
        assert all(bar in text_of(signed_in(who), "/quotas/?f=h800") for who in readers), bar
    panel = signed_in(house.lin).post(
        "/requests/fit/",
        {
            "ask_by": "flavour", "flavour": "h800", "shape": "whole", "gpus_per_node": "1", "nodes": "1",
            "start": "asap", "hours": "1", "work_class": "training", "interruptible": "yes", "run_kind": "command",
            "token": "t1", "department": str(house.video.uid), "purpose": "a test", "command": "python train.py",
        },
    )  # fmt: skip
    assert "1 + 1 = 2 / 32" in unescape(panel.content.decode()).replace("\xa0", " ")
