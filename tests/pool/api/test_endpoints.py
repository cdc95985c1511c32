"""Where a service answers: healthy replicas first, for those who may see it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.test import Client

from pool.models import Allocation, AllocationEvent, AllocationMember
from quotas.models import CapacityRequest
from tests.pool import builders as pool
from tests.portal.builders import bearer, token_of
from tests.quotas import build

pytestmark = pytest.mark.django_db


def asked(who: Any, uid: Any) -> Any:
    return Client().get(f"/api/v1/service-endpoints/{uid}/", **bearer(token_of(who, "read")))


def test_replicas_in_the_order_in_which_to_ask_them() -> None:
    team = build.department("vision")
    lin = build.user("lin", home=team)
    common = {"requester": lin, "department": team, "shape": "cpu", "command": "serve"}
    head = CapacityRequest.objects.create(
        **common, series="service", is_service=True, state="series", health={"kind": "tcp", "port": 8000}
    )
    rows = []
    for number, (state, news) in enumerate(
        [("running", "health_failed"), ("running", ""), ("running", "health_ok"), ("ended", "health_ok")]
    ):
        one = CapacityRequest.objects.create(**common, head=head, member_index=number, state="allocated")
        node = pool.node(None, name=f"n-{number}", address=f"10.0.0.{number}")
        row = Allocation.objects.create(request=one, holder=lin, department=team, charge_milli=0, state=state)
        AllocationMember.objects.create(allocation=row, number=0, node=node, state=state)
        if news == "health_ok":
            AllocationEvent.objects.create(allocation=row, kind="health_failed", facts={"member": 0})
        if news:
            AllocationEvent.objects.create(allocation=row, kind=news, facts={"member": 0})
        rows.append(row)
    answer = asked(lin, head.uid)
    assert answer.status_code == 200
    body = answer.json()
    told = [
        (one["replica"], one["node"], one["address"], one["port"], one["healthy"]) for one in body["replicas"]
    ]
    assert body["ref"] == head.ref and told == [
        (2, "n-2", "10.0.0.2", 8000, True),
        (1, "n-1", "10.0.0.1", 8000, None),
        (0, "n-0", "10.0.0.0", 8000, False),
    ]
    assert body["replicas"][0]["allocation"] == str(rows[2].uid)
    assert asked(build.user("stranger", home=team), head.uid).status_code == 404
    assert asked(lin, uuid4()).status_code == 404
