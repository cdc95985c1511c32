"""Finance pages: each reader sees theirs, totals equal their lines, files say the same."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from urllib.parse import parse_qsl

import pytest
from django.test import Client
from django.urls import reverse

from portal.kernel.clock import set_clock
from quotas.models import LedgerEntry, PriceRate
from quotas.tasks_money import reconcile_books
from quotas.web.money import common
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
NOON = at("2026-06-16 12:00")


@pytest.fixture
def lab() -> World:
    w = world()
    w.price("16", at("2026-05-01"))
    w.lease(at("2026-05-10 10:00"), at("2026-05-10 12:20"), charge=333)
    w.lease(at("2026-06-10 22:30"), at("2026-06-11 01:00"))
    w.lease(
        at("2026-06-12 09:00"), at("2026-06-12 09:07"), department=w.search, user=person("wei", name="王伟")
    )
    w.lease(at("2026-06-16 09:00"))
    return w


def get(who: object, name: str, moment: datetime = NOON, **query: str):
    client = Client()
    client.force_login(who)
    with set_clock(moment):
        return client.get(reverse(f"quotas:{name}"), query)


@pytest.mark.parametrize("name", ["finance-home", "month", "ledger", "prices", "month-close"])
@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_every_page_opens_for_finance_within_the_budget(
    lab: World, name: str, language: str, django_assert_max_num_queries
) -> None:
    sun = person("sun", ("finance", None))
    client = Client()
    client.force_login(sun)
    client.cookies["django_language"] = language
    with set_clock(NOON):
        client.get(reverse(f"quotas:{name}"))
        with django_assert_max_num_queries(15):
            answer = client.get(reverse(f"quotas:{name}"))
    assert answer.status_code == 200
    assert len(answer.content) < 60_000


def test_totals_equal_their_lines_on_screen_and_in_files(lab: World) -> None:
    sun = person("sun", ("finance", None))
    for by in ("department", "flavour", "user", "site"):
        report = get(sun, "month", by=by).context["report"]
        assert sum(g.total.amount_micro for g in report.groups) == report.total.amount_micro
        assert sum(g.total.gpu_ms for g in report.groups) == report.total.gpu_ms
        days = sum(t.amount_micro for by_day in report.by_day.values() for t in by_day.values())
        assert days + report.outside.amount_micro == report.total.amount_micro
    machine = list(
        csv.DictReader(io.StringIO(get(sun, "month-file", **{"for": "machines"}).content.decode()))
    )
    assert sum(int(row["amount_micro"]) for row in machine) == report.total.amount_micro
    assert sum(int(row["gpu_ms"]) for row in machine) == report.total.gpu_ms
    assert [row["kind"] for row in machine].count("running") == 1
    listed = get(sun, "ledger", month="2026-06").context
    assert listed["all_micro"] == report.total.amount_micro
    page = get(sun, "month", by="department").context
    links = dict(zip(page["figure"]["links"]["to"], page["figure"]["table"]["rows"], strict=True))
    used = {to: row for to, row in links.items() if row[-1] != "0.00"}
    assert len(used) > 1
    for to, row in used.items():
        inside = get(sun, "ledger", **dict(parse_qsl(to.partition("?")[2]))).context  # a day opens its lines
        assert inside["chosen"].day.isoformat() == row[0]
        assert [f"{inside['all_ms'] / 3_600_000:,.1f}", f"{inside['all_micro'] / 1e6:,.2f}"] == row[-2:]
    for group in page["report"].groups:
        inside = get(sun, "ledger", month="2026-06", **group.params).context
        assert inside["all_micro"] == group.total.amount_micro


def test_P055_P058_a_file_for_people_says_what_it_is_and_runs_no_formula(lab: World) -> None:
    request = lab.request()
    request.cost_code = "=HYPERLINK(1)"
    request.save()
    line = LedgerEntry.objects.order_by("-id").first()
    line.pk, line.uid, line.span, line.cost_code = None, request.uid, None, "=HYPERLINK(1)"
    line.starts_at = at("2026-06-01 00:00")
    line.save()
    text = get(person("sun", ("finance", None)), "month-file", **{"for": "people"}).content.decode()
    assert text.startswith("\ufeff# ")
    assert "Asia/Shanghai" in text
    assert "CNY" in text
    assert "'=HYPERLINK(1)" in text
    assert "2026-06-01 00:00:00+08:00" in text


def test_a_researcher_sees_own_lines_only_and_a_lead_the_subtree(lab: World) -> None:
    own = get(lab.user, "month").context["report"]
    assert {g.label for g in own.groups} == {"Vision"}
    wei = get(person("w2", ("researcher", lab.search)), "month").context["report"]
    assert wei.total.lines == 0
    lead = person("lead", ("lead", lab.search))
    assert {g.label for g in get(lead, "month").context["report"].groups} == {"Search"}
    assert {line.user_name for line in get(lead, "ledger").context["page"]} == {"王伟"}
    line = LedgerEntry.objects.filter(department_id_ref=lab.vision.pk).first()
    client = Client()
    client.force_login(lead)
    assert client.get(reverse("quotas:ledger-entry", args=[line.uid])).status_code == 404
    assert client.get(reverse("quotas:month"), {"department": str(lab.vision.uid)}).status_code == 404
    for name in ("month", "ledger"):  # nor a person of another branch, by changing the id
        assert client.get(reverse(f"quotas:{name}"), {"user": str(lab.user.uid)}).status_code == 404
    assert client.get(reverse("quotas:prices")).status_code == 403
    assert client.get(reverse("quotas:month-close")).status_code == 403


def test_a_wrong_month_or_grouping_is_said_and_nothing_breaks(lab: World) -> None:
    sun = person("sun", ("finance", None))
    for query in (
        {"month": "2026-13"},
        {"month": "x"},
        {"month": "9999-12"},
        {"month": "0001-01"},
        {"by": "salary"},
    ):
        assert get(sun, "month", **query).status_code == 400
    assert get(sun, "month", user="nobody").status_code == 404
    assert get(sun, "month", month="1999-01").context["report"].total.lines == 0


def test_a_price_is_set_on_the_page_and_a_bad_one_keeps_what_was_typed(lab: World) -> None:
    sun = person("sun", ("finance", None))
    client = Client()
    client.force_login(sun)
    good = {
        "flavour": lab.flavour.pk,
        "price": "12.5",
        "valid_from": "2026-07-01T00:00",
        "reason": "contract",
    }
    with set_clock(NOON):
        bad = client.post(reverse("quotas:prices"), good | {"price": "-3"})
        assert bad.status_code == 400
        assert "-3" in bad.content.decode()
        past = client.post(reverse("quotas:prices"), good | {"valid_from": "2026-06-01T00:00"})
        assert past.status_code == 400
        assert PriceRate.objects.count() == 1
        assert client.post(reverse("quotas:prices"), good).status_code == 302
    assert PriceRate.objects.order_by("-id")[0].during.lower == at("2026-07-01")
    client.force_login(person("audit", ("auditor", None)))
    assert client.post(reverse("quotas:prices"), good).status_code == 403


def test_a_correction_is_booked_from_the_entry_page(lab: World) -> None:
    line = LedgerEntry.objects.order_by("id").last()
    client = Client()
    client.force_login(person("sun", ("finance", None)))
    url = reverse("quotas:ledger-entry", args=[line.uid])
    assert client.post(url, {"hours": "-0.01", "amount": "-0.16", "reason": "XID 79"}).status_code == 302
    assert client.post(url, {"hours": "-99", "amount": "0", "reason": "XID 79"}).status_code == 400
    assert line.corrections.count() == 1


def test_a_month_is_closed_on_its_page(lab: World) -> None:
    client = Client()
    client.force_login(person("sun", ("finance", None)))
    url = reverse("quotas:month-close") + "?month=2026-05"
    lab.counter(lab.vision, 1000)
    with set_clock(NOON):
        assert not client.get(url).context["ready"]  # not compared yet
        reconcile_books()
        assert client.get(url).context["ready"]
        assert client.post(url).status_code == 302
        page = client.get(url)
    assert page.context["row"].closed_by_name == "sun"


def test_a_file_of_too_many_lines_is_offered_as_a_large_one(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "LINES_AT_ONCE", 2)
    sun = person("sun", ("finance", None))
    sent = get(sun, "month-file", **{"for": "machines", "site": "sh"})
    wanted = f"{reverse('monitoring:exports')}?site=sh&month=2026-06&file=lines_machines#new"
    assert (sent.status_code, sent["Location"]) == (302, wanted)
    client = Client()
    client.force_login(sun)
    with set_clock(NOON):
        form = client.get(wanted.partition("#")[0]).content.decode()
    assert '<option value="lines_machines" selected>' in form and '<option value="2026-06" selected>' in form
    assert get(sun, "ledger-file", **{"for": "people"}).status_code == 302
    assert get(sun, "ledger-file", **{"for": "people", "q": "R-1"}).status_code == 200
    assert get(sun, "month-file", **{"for": "people", "rows": "groups"}).status_code == 200


def test_a_foreign_department_is_not_there_whatever_the_page_or_the_api(lab: World) -> None:
    """A lead of Vision who writes Search into an address, by its uid and by its code."""
    lead = person("lead", ("lead", lab.vision))
    client = Client()
    client.force_login(lead)
    before = LedgerEntry.objects.count()
    line = LedgerEntry.objects.filter(department_id_ref=lab.search.pk).first()
    assert line is not None
    with set_clock(NOON):
        for value in (lab.search.uid, lab.search.code):
            for address in (
                reverse("quotas:month"), reverse("quotas:month-file"), reverse("quotas:ledger"),
                reverse("quotas:ledger-file"), reverse("monitoring:exports"),
                *(reverse("monitoring:report", args=[k]) for k in ("utilization", "chargeback", "waste", "waits")),
                reverse("monitoring:report-file", args=["chargeback"]), "/api/v1/ledger/", "/api/v1/months/2026-06/",
                "/api/v1/reports/utilization/",
            ):  # fmt: skip
                assert client.get(address, {"department": value}).status_code == 404, address
        assert client.get(reverse("quotas:ledger-entry", args=[line.uid])).status_code == 404
        assert client.get(f"/api/v1/ledger/{line.uid}/").status_code == 404
        wrong = client.post(
            reverse("quotas:ledger-entry", args=[line.uid]), {"hours": -1, "amount": -1, "reason": "x"}
        )
        assert wrong.status_code == 404
        body = {"gpu_ms": -1, "amount_micro": -1, "reason": "x"}
        refused = client.post(
            f"/api/v1/ledger/{line.uid}/corrections/", body, content_type="application/json"
        )
        assert refused.status_code == 404
        mine = client.get("/api/v1/ledger/").json()["results"]
    assert mine and {row["department"] for row in mine} == {"Lab / Vision"}
    assert LedgerEntry.objects.count() == before
