"""What belongs to others in this room, for the walk of a foreign person over every address (behaviour
P020).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from portal.kernel.clock import now
from quotas.selectors.grants import GrantNumbers
from quotas.services.approvals import open_step_of
from quotas.services.delegations import delegation_create
from quotas.services.quota_changes import quota_change_submit
from tests.portal import walk
from tests.quotas import build


def _house() -> build.House:
    from portal.accounts.models import Department

    if Department.objects.filter(code="vision").exists():
        return _kept[-1]
    _kept.append(build.House())
    return _kept[-1]


_kept: list[build.House] = []


def a_request() -> dict[str, Any]:
    return {"uid": _house().submit(gpus_per_node=8, duration_s=48 * 3600).uid}


def an_act() -> dict[str, Any]:
    return {**a_request(), "act": "withdraw"}


def a_step() -> dict[str, Any]:
    return {"uid": open_step_of(_house().submit(gpus_per_node=8, duration_s=48 * 3600)).uid}


def a_change() -> dict[str, Any]:
    house = _house()
    change = quota_change_submit(
        acting_user=build.actor(house.chen), policy=build.policy(house.chen), department=house.video,
        flavour=house.h800, asked=GrantNumbers(30_000), purpose="x",
    )  # fmt: skip
    return {"uid": change.uid}


def a_change_act() -> dict[str, Any]:
    return {**a_change(), "act": "withdraw"}


def a_delegation() -> dict[str, Any]:
    house = _house()
    made = delegation_create(
        acting_user=build.actor(house.chen),
        policy=build.policy(house.chen),
        deputy=house.wu,
        ends_at=now() + timedelta(days=1),
    )
    return {"uid": made.uid}


REQUEST = ("quotas:request-detail", "quotas:request-edit")
REQUEST_API = ("detail", "submit", "withdraw", "clone", "consent", "events")
for name in (*REQUEST, *(f"v1:request-{act}" for act in REQUEST_API)):
    walk.something_of_others(name, a_request)
walk.something_of_others("quotas:request-act", an_act)
for name in ("quotas:approval-detail", "quotas:approval-decide", "v1:approval-detail", "v1:approval-decide"):
    walk.something_of_others(name, a_step)
for name in ("quotas:quota-change", "v1:quota-change-detail", "v1:quota-change-withdraw"):
    walk.something_of_others(name, a_change)
walk.something_of_others("quotas:quota-change-act", a_change_act)
for name in ("quotas:delegation-end", "v1:delegation-revoke"):
    walk.something_of_others(name, a_delegation)
walk.open_to_all(
    "quotas:home",
    "quotas:request-list",
    "quotas:request-new",
    "quotas:request-fit",
    "quotas:approvals-bulk",
    "quotas:quota-tree",
    "quotas:quota-changes",
    "quotas:quota-change-new",
)
