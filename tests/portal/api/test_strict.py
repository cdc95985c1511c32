"""What an operation's description does not have is refused, on every operation of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db.models import Model
from drf_spectacular.generators import SchemaGenerator
from rest_framework.test import APIClient

from portal.accounts.models import Role
from portal.ops.models import AuditEvent
from quotas.models import UserLimit
from tests.portal.builders import person

pytestmark = pytest.mark.django_db
NOBODYS = {"uid": "018f0000-0000-7000-8000-000000000000", "month": "2026-01", "kind": "people"}
NO_VALUE = {"boolean": "perhaps", "integer": "many", "uuid": "17", "date-time": "2026-06-16 14:03"}


@pytest.fixture
def client() -> APIClient:
    """Somebody who may do everything, so that nothing is refused for want of a role."""
    user = person("everything", *((role, None) for role in Role.values))
    client = APIClient()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    client.cookies["django_language"] = "en"
    return client


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return SchemaGenerator().get_schema(request=None, public=True)


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, address with made-up ids, description) of every operation."""
    for path, methods in schema["paths"].items():
        for method, described in methods.items():
            yield method, re.sub(r"{(\w+)}", made_up, path), described


def made_up(found: re.Match[str]) -> str:
    return NOBODYS.get(found[1], NOBODYS["uid"])


def refusal(answer: Any) -> tuple[int, str, list[str]]:
    body = answer.json()
    return answer.status_code, answer["Content-Type"], [one["pointer"] for one in body["errors"]]


def refused(*pointers: str) -> tuple[int, str, list[str]]:
    return 400, "application/problem+json", sorted(pointers)


def test_query_parameters_that_are_not_described(client: APIClient, schema: dict[str, Any]) -> None:
    seen = 0
    for method, url, _described in operations(schema):
        for name in ("colour", "Page", "zz-top"):
            answer = getattr(client, method)(f"{url}?{name}=1")
            assert refusal(answer) == refused(name), f"{method} {url}"
            assert answer.json()["code"] == "unknown_filter"
            seen += 1
    assert seen > 200


def test_values_that_are_not_described(client: APIClient, schema: dict[str, Any]) -> None:
    seen, taken = set(), []
    for method, url, described in operations(schema):
        for parameter in described.get("parameters", []):
            if parameter["in"] != "query":
                continue
            name, shape = parameter["name"], parameter["schema"]
            kind = "enum" if "enum" in shape else shape.get("format") or shape["type"]
            value = "zz" if kind == "enum" else NO_VALUE.get(kind)
            getattr(client, method)(
                url, {name: ""}
            )  # as if it were not sent: an exception would come out here
            if value is None:
                continue
            answer = getattr(client, method)(url, {name: value})
            if answer.status_code == 404 and (kind == "date-time" or name.startswith("page")):
                assert NOBODYS["uid"] in url  # what it is a part of is looked up first
                continue
            if answer.status_code != 400 or refusal(answer) != refused(name):
                taken.append(f"{method} {url} {name}={value}")
            seen.add(kind)
    assert taken == []
    assert seen == {"enum", "boolean", "integer", "uuid", "date-time"}


def test_pages_and_orders(client: APIClient, schema: dict[str, Any]) -> None:
    lists = 0
    for method, url, described in operations(schema):
        if method != "get":
            continue
        names = {p["name"] for p in described.get("parameters", []) if p["in"] == "query"}
        for name in {"page", "page_size"} & names:
            for value in ("0", "-1", "1.5", "ten", "²"):
                if NOBODYS["uid"] in url:
                    continue
                assert refusal(client.get(f"{url}?{name}={value}")) == refused(name), f"{url} {name}={value}"
        if "ordering" not in names:
            assert refusal(client.get(f"{url}?ordering=name")) == refused("ordering")
        lists += "page_size" in names
    assert lists >= 18
    assert refusal(client.get("/api/v1/users/?ordering=password")) == refused("ordering")
    assert refusal(client.get("/api/v1/audit/?cursor=tomorrow")) == refused("cursor")
    assert client.get("/api/v1/users/?page_size=1000000000000").status_code == 200
    assert client.get("/api/v1/users/?page=2").status_code == 404
    assert refusal(client.get("/api/v1/allocations/?state=running&state=ended")) == refused("state")


def test_members_of_a_body_that_are_not_described(client: APIClient, schema: dict[str, Any]) -> None:
    before = (AuditEvent.objects.count(), counted())
    seen = 0
    for method, url, described in operations(schema):
        sends = described.get("requestBody", {}).get("content", {"application/json": {}})
        if method == "get" or "application/json" not in sends:  # files
            continue
        answer = getattr(client, method)(url, {"max_gpus": 4, "Zeit": None}, format="json")
        assert refusal(answer) == refused("Zeit", "max_gpus"), f"{method} {url}"
        assert answer.json()["code"] == "unknown_field"
        assert refusal(getattr(client, method)(url, [{"name": "x"}], format="json"))[0] == 400
        seen += 1
    assert seen > 40
    assert (AuditEvent.objects.count(), counted()) == before


def counted() -> dict[str, int]:
    from django.apps import apps

    rooms = ("accounts", "notify", "quotas", "pool", "monitoring")
    models: list[type[Model]] = [m for room in rooms for m in apps.get_app_config(room).get_models()]
    return {m._meta.label: m._default_manager.count() for m in models}


def test_a_limit_that_is_left_out_stays(client: APIClient) -> None:
    person("lin")
    url = "/api/v1/user-limits/"
    client.post(url, {"user": "lin", "gpus_at_once_milli": 8000, "longest_lease_s": 3600}, format="json")
    wrong = client.post(url, {"user": "lin", "max_gpus": 1}, format="json")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "unknown_field")
    changed = client.post(url, {"user": "lin", "longest_lease_s": None}, format="json")
    assert changed.status_code == 200
    row = UserLimit.objects.get(user=get_user_model().objects.get(username="lin"))
    assert (row.gpus_at_once_milli, row.longest_lease_s) == (8000, None)
