"""API of prices, ledger and months: the same rule and the same sums as the pages."""

from __future__ import annotations

import pytest
from rest_framework.test import APIClient

from portal.kernel.clock import set_clock
from quotas.models import LedgerEntry, PriceRate
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
NOON = at("2026-06-16 12:00")


@pytest.fixture
def lab() -> World:
    w = world()
    w.price("16", at("2026-05-01"))
    w.lease(at("2026-06-10 22:30"), at("2026-06-11 01:00"))
    w.lease(at("2026-06-12 09:00"), at("2026-06-12 09:07"), department=w.search, user=person("wei"))
    w.lease(at("2026-06-16 09:00"))
    return w


def client(*roles: tuple[str, object], name: str = "api") -> APIClient:
    c = APIClient()
    c.force_login(person(name, *roles))
    return c


def test_month_groups_sum_to_the_total(lab: World) -> None:
    with set_clock(NOON):
        body = client(("auditor", None)).get("/api/v1/months/2026-06/", {"by": "user"}).json()
    assert sum(g["amount_micro"] for g in body["groups"]) == body["total"]["amount_micro"]
    booked = sum(e.amount_micro for e in LedgerEntry.objects.all())
    assert body["total"]["amount_micro"] == booked + body["running"]["amount_micro"]
    assert body["running"]["gpu_ms"] == 3 * 3_600_000


def test_prices_are_set_by_finance_only_and_bad_ones_are_problems(lab: World) -> None:
    good = {
        "flavour": "H800-80GB",
        "micro_per_gpu_hour": 1,
        "valid_from": "2027-01-01T00:00:00Z",
        "reason": "r",
    }
    assert client(("lead", lab.root)).post("/api/v1/prices/", good).status_code == 403
    sun = client(("finance", None), name="sun")
    assert sun.post("/api/v1/prices/", good).status_code == 201
    for bad, code in (
        ({"micro_per_gpu_hour": -1}, 400),
        ({"micro_per_gpu_hour": "much"}, 400),
        ({"flavour": "none"}, 400),
        ({}, 409),
    ):
        answer = sun.post("/api/v1/prices/", good | bad)
        assert answer.status_code == code
        assert answer["Content-Type"] == "application/problem+json"
        assert answer.json()["code"]
    assert PriceRate.objects.count() == 2
    assert len(sun.get("/api/v1/prices/").json()["results"]) == 2
    assert sun.get("/api/v1/prices/", {"colour": "red"}).status_code == 400


def test_the_ledger_shows_each_caller_the_own_part(lab: World) -> None:
    assert client(("finance", None)).get("/api/v1/ledger/").json()["count"] == 3
    assert client(("lead", lab.search), name="l").get("/api/v1/ledger/").json()["count"] == 1
    assert client(("researcher", lab.vision), name="r").get("/api/v1/ledger/").json()["count"] == 0
    foreign = LedgerEntry.objects.filter(department_id_ref=lab.vision.pk).first()
    assert client(("lead", lab.search), name="l2").get(f"/api/v1/ledger/{foreign.uid}/").status_code == 404


def test_corrections_and_close_over_the_api(lab: World) -> None:
    sun = client(("finance", None))
    line = LedgerEntry.objects.first()
    url = f"/api/v1/ledger/{line.uid}/corrections/"
    assert sun.post(url, {"amount_micro": -1, "reason": "rounding"}).status_code == 201
    assert sun.post(url, {"amount_micro": -(10**15), "reason": "rounding"}).status_code == 400
    with set_clock(NOON):
        answer = sun.post("/api/v1/months/2026-06/close/")
    assert answer.status_code == 409
    assert "month_over" in answer.json()["checks"]
