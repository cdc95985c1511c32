"""What a node can do and lacks, and how its holder reaches a lease from their own machine, on the pages."""

from __future__ import annotations

import html

import pytest

from pool.models import Allocation, AllocationEvent
from pool.services.cycle import schedule_cycle
from portal.accounts.models import User
from tests.pool import builders as pool
from tests.portal.builders import client_of
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)

CAN = {
    "fractions": {"ok": False, "reason": "no_mps_control"},
    "containers": {"ok": False, "reason": "no_podman"},
    "mig": {"ok": True, "reason": None},
    "accounts": {"ok": False, "reason": "not_root"},
    "holds": {"ok": False, "reason": "something_newer"},
}


@pytest.fixture
def held() -> Allocation:
    team = build.department("vision", name="Vision")
    flavour = build.flavour("h800", installed=None)
    pool.node(flavour, name="sh-01", facts={"can": CAN})
    build.limits(team, flavour, 8)
    request = pool.queued(team, flavour, 1)
    schedule_cycle(cause="test")
    allocation = Allocation.objects.get(request=request)
    pool.report_running(allocation)
    allocation.refresh_from_db()
    return allocation


def text_of(who: User, path: str) -> str:
    User.objects.filter(pk=who.pk).update(language="en")
    answer = client_of(who).get(path)
    assert answer.status_code == 200
    return html.unescape(answer.content.decode())


def test_a_node_says_plainly_what_it_lacks(held: Allocation) -> None:
    node = held.members.get().node
    page = text_of(held.holder, f"/nodes/{node.uid}/")
    assert "What it can do" in page and "podman is not installed" in page
    assert "shares are watched, not limited" in page and "the agent does not run as root" in page
    assert "something_newer" in page
    node.facts = {}
    node.save(update_fields=["facts"])
    assert "What it can do" not in text_of(held.holder, f"/nodes/{node.uid}/")


def test_a_lease_shows_its_holder_the_way_in_and_the_trail_of_it(held: Allocation) -> None:
    AllocationEvent.objects.create(
        allocation=held, kind="remote_opened", facts={"kind": "shell", "member": 0}
    )
    path = f"/leases/{held.uid}/"
    mine = text_of(held.holder, path)
    assert f"gpupool shell {held.request.ref}" in mine and "/client/gpupool" in mine
    assert "A terminal was opened in it" in mine
    chief = build.user("chief")
    build.role(chief, "pool_admin", None)
    theirs = text_of(chief, path)
    assert "gpupool shell" not in theirs and "A terminal was opened in it" in theirs


def test_the_program_is_served_as_one_file_and_known_again() -> None:
    from django.test import Client

    answer = Client().get("/client/gpupool")
    assert answer.status_code == 200 and answer.content.startswith(b"#!/usr/bin/env python3\n")
    again = Client().get("/client/gpupool", HTTP_IF_NONE_MATCH=answer["ETag"])
    assert again.status_code == 304
