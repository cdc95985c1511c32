"""A foreign person, and nobody at all, on every address of the installation (behaviour P020)."""

from __future__ import annotations

import pytest
from django.test import Client

from portal.accounts.models import ApiToken
from portal.accounts.services import token_create
from portal.notify.services import notify, webhook_create
from portal.ops.models import AuditEvent, OutboxEvent
from portal.ops.services import incident_open
from tests.portal import walk, walk_rooms
from tests.portal.builders import (
    SYSTEM,
    actor,
    admin,
    bearer,
    binding,
    client_of,
    department,
    person,
    token_of,
)

pytestmark = pytest.mark.django_db
ELSEWHERE = "203.0.113.9"  # a scraper on this machine may read /metrics
STAYS_OUT = {301, 302, 400, 401, 403, 404, 405, 415}

walk_rooms.register()


def _user() -> dict[str, object]:
    return {"uid": person("", ("researcher", department(f"du{person().pk}"))).uid}


def _token() -> dict[str, object]:
    owner = person()
    return {"uid": token_create(acting_user=actor(owner), user=owner, name="t", scopes=["read"])[0].uid}


def _binding() -> dict[str, object]:
    return {"uid": binding(person("", ("lead", department(f"b{person().pk}")))).uid}


def _department() -> dict[str, object]:
    return {"uid": department(f"x{person().pk}").uid}


def _notice() -> dict[str, object]:
    return {"uid": notify(user_ids=[person().pk], kind="t")[0].uid}


def _incident() -> dict[str, object]:
    return {"uid": incident_open(kind="t", dedupe_key=f"k{person().pk}").uid}


def _webhook() -> dict[str, object]:
    return {"uid": webhook_create(acting_user=SYSTEM, name="w", url="https://h/x", kinds=[]).uid}


FACTORIES = {
    _user: ["person", "person_edit", "person_role", "person_suspend", "person_reactivate", "person_password"],
    _token: ["token_revoke", "token_rotate"],
    _binding: ["role_end"],
    _department: [
        "department",
        "department_edit",
        "department_move",
        "department_close",
        "department_reopen",
    ],
}
for factory, names in FACTORIES.items():
    for name in names:
        walk.something_of_others(f"accounts:{name}", factory)
for name in ("open",):
    walk.something_of_others(f"notify:{name}", _notice)
for name in ("webhook", "webhook_test"):
    walk.something_of_others(f"notify:{name}", _webhook)
for name in ("incident", "incident_take", "incident_note", "incident_close"):
    walk.something_of_others(f"ops:{name}", _incident)
for base, factory, acts in (
    ("user", _user, ("detail", "suspend", "reactivate", "password")),
    ("department", _department, ("detail", "move", "close", "reopen")),
    ("role-binding", _binding, ("detail", "end")),
    ("token", _token, ("detail", "revoke", "rotate")),
    ("notification", _notice, ("detail", "read")),
    ("webhook", _webhook, ("detail", "test")),
    ("incident", _incident, ("detail", "entries", "acknowledge", "note", "close")),
):
    for act in acts:
        walk.something_of_others(f"v1:{base}-{act}", factory)


def _written() -> tuple[int, int, int]:
    live = ApiToken.objects.filter(revoked_at=None).count()
    return AuditEvent.objects.count(), OutboxEvent.objects.count(), live


def _urls() -> list[tuple[walk.Address, str]]:
    return [(address, url) for address in walk.addresses() for url in address.urls()]


def test_P020_nobody_gets_in_without_signing_in() -> None:
    client = Client(raise_request_exception=False, REMOTE_ADDR=ELSEWHERE)
    asked = [(a, u) for a, u in _urls() if a.name not in walk.PUBLIC]
    before = _written()
    wrong = []
    for address, url in asked:
        for method in (client.get, client.post):
            status = method(url).status_code
            if status not in STAYS_OUT:
                wrong.append((address.name, url, method.__name__, status))
    assert wrong == []
    assert _written() == before


def test_P020_a_foreign_person_gets_at_nothing_of_others() -> None:
    asked = [(a, u) for a, u in _urls() if a.arguments and a.name not in walk.OPEN]
    foreign = client_of(person("foreign"))
    foreign.raise_request_exception = False
    before = _written()
    wrong = []
    for address, url in asked:
        for method in (foreign.get, foreign.post):
            answer = method(url, HTTP_ACCEPT="text/html,application/json")
            if answer.status_code not in STAYS_OUT:
                wrong.append((address.name, url, method.__name__, answer.status_code))
    assert wrong == []
    assert _written() == before


def test_P020_the_same_with_a_token_of_all_scopes() -> None:
    asked = [(a, u) for a, u in _urls() if a.arguments and u.startswith("/api/") and a.name not in walk.OPEN]
    value = token_of(person("foreign"), "read", "request", "approve", "admin")
    client = Client(raise_request_exception=False, REMOTE_ADDR=ELSEWHERE)
    before = _written()
    wrong = []
    for address, url in asked:
        for method in (client.get, client.post, client.patch, client.delete):
            status = method(url, data={}, content_type="application/json", **bearer(value)).status_code
            if status not in STAYS_OUT:
                wrong.append((address.name, url, method.__name__, status))
    assert wrong == []
    assert _written() == before


def test_pages_of_people_audit_and_incidents_are_closed_to_people_without_roles() -> None:
    foreign = client_of(person("foreign"))
    admin()
    for address in walk.addresses():
        room = address.name.split(":")[0]
        if address.arguments or room not in {"accounts", "notify", "ops"} or address.name in walk.OPEN:
            continue
        answer = foreign.get(walk.reverse(address.name))
        assert answer.status_code in {302, 403, 404, 405}, (address.name, answer.status_code)


def test_lists_of_the_api_are_empty_for_people_without_anything() -> None:
    for factory in (_user, _token, _binding, _department, _notice, _incident):
        factory()
    foreign = client_of(person("foreign"))
    foreign.raise_request_exception = False
    for address in walk.addresses():
        if not address.name.startswith("v1:") or not address.name.endswith("-list") or address.arguments:
            continue
        answer = foreign.get(walk.reverse(address.name))
        assert answer.status_code in {200, 403, 405}, (address.name, answer.status_code)
        if answer.status_code == 200 and address.name not in {"v1:user-list"}:
            body = answer.json()
            rows = body["results"] if isinstance(body, dict) and "results" in body else body
            if address.name in {
                f"v1:{b}-list" for b in ("department", "role-binding", "token", "notification")
            }:
                assert rows == [], address.name


def test_a_lead_sees_the_own_subtree_only() -> None:
    mine, other = department("mine"), department("other")
    below = department("below", mine)
    lead = person("lead", ("lead", mine))
    a, b = person("a", home_department=below), person("b", home_department=other)
    client = client_of(lead)
    assert client.get(f"/people/{a.uid}/").status_code == 200
    assert client.get(f"/people/{b.uid}/").status_code == 404
    assert client.get(f"/departments/{below.uid}/").status_code == 200
    assert client.get(f"/departments/{other.uid}/").status_code == 404
    names = {row["username"] for row in client.get("/api/v1/users/").json()["results"]}
    assert names == {"lead", "a"}
    codes = {row["code"] for row in client.get("/api/v1/departments/").json()["results"]}
    assert codes == {"mine", "below"}
    assert (
        client.post(f"/people/{a.uid}/suspend/", {"suspend-reason": "x", "suspend-leases": "end"}).status_code
        == 403
    )
