"""Budgets: used to the last digit, warned once per threshold, forecast with its basis."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from django.test import Client
from django.urls import reverse

from portal.accounts.policy import DepartmentTree
from portal.kernel.clock import set_clock
from portal.kernel.errors import DomainError, Invalid
from portal.kernel.units import MS_PER_HOUR, cost_micro
from portal.notify.models import Notification
from portal.ops.actor import SYSTEM, Actor
from quotas.models import Budget, BudgetWarning, PriceRate, QuotaGrant, QuotaUsage
from quotas.selectors.budgets import budget_states, budgets_in_force, stopped_roots
from quotas.selectors.price_preview import price_preview
from quotas.services.budgets import budget_end, budget_set, budgets_watch, period_end
from quotas.services.grants import limits_sweep
from quotas.services.ledger import ledger_accrue
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
MAY = date(2026, 5, 1)


@pytest.fixture
def w() -> World:
    made = world()
    made.price("10", at("2026-01-01T00:00"))
    return made


def set_for(w: World, **values: object) -> Budget:
    given = {
        "department": w.vision, "period": "month", "starts_on": MAY, "amount_micro": 1_000_000_000, "gpu_ms": None,
    }  # fmt: skip
    return budget_set(acting_user=SYSTEM, **{**given, **values})  # type: ignore[arg-type]


def state_of(budget: Budget):  # type: ignore[no-untyped-def]
    (state,) = budget_states([budget], DepartmentTree.load())
    return state


def test_used_is_booked_and_running_of_the_subtree_in_the_periods_months(w: World) -> None:
    with set_clock(at("2026-05-01T00:00")):
        budget = set_for(w, department=w.root, gpu_ms=200 * MS_PER_HOUR)
        set_for(w, period="quarter", starts_on=date(2026, 4, 1))
    w.lease(at("2026-04-30T12:00"), at("2026-05-02T12:00"))  # 36 h in May
    w.lease(at("2026-05-10T00:00"), None, department=w.search, charge=500)
    with set_clock(at("2026-05-12T06:00")):
        ledger_accrue()
        state = state_of(budget)
        money, hours = state.measures
        # 36 h + half a card for 54 h
        assert hours.used == (36 + 27) * MS_PER_HOUR
        assert money.used == 630_000_000
        assert money.percent == 63
        # 4 to 11 May: nothing but half a card for 48 h in the last seven whole days
        assert money.forecast is not None and money.forecast.days == 7
        assert money.forecast.daily == 240_000_000 // 7
        assert money.forecast.total == 630_000_000 + round(240_000_000 // 7 * 19.75)
        quarter = state_of(Budget.objects.get(period="quarter"))
        assert quarter.measures[0].used == 480_000_000


def test_each_threshold_is_told_once_to_leads_and_finance(w: World) -> None:
    lead, finance = person("lead", ("lead", w.vision)), person("fin", ("finance", None))
    person("other", ("lead", w.search))
    with set_clock(at("2026-05-01T00:00")):
        budget = set_for(w)
    w.lease(at("2026-05-03T00:00"), at("2026-05-05T07:00"))  # 55 h: 550.00
    with set_clock(at("2026-05-06T00:00")):
        assert budgets_watch() == 2
        assert budgets_watch() == 0
    told = Notification.objects.filter(kind="quotas.budget_used")
    assert {n.user_id for n in told} == {lead.pk, finance.pk}
    assert {n.threshold for n in told} == {"money:50"}
    w.lease(at("2026-05-07T00:00"), at("2026-05-09T00:00"))  # 48 h more: 103 %
    with set_clock(at("2026-05-10T00:00")):
        assert budgets_watch() == 2
        assert budgets_watch() == 0
    assert list(BudgetWarning.objects.order_by("percent").values_list("percent", "used")) == [
        (50, 550_000_000),
        (80, 1_030_000_000),
        (100, 1_030_000_000),
    ]
    assert sorted(told.all().values_list("threshold", flat=True)) == ["money:100"] * 2 + ["money:50"] * 2
    assert budget.warnings.count() == 3


def test_a_used_up_budget_that_stops_takes_away_what_may_be_borrowed_until_it_ends(w: World) -> None:
    def limits() -> dict:
        rows = QuotaUsage.objects.filter(flavour=w.flavour, granted=True)
        return {row.department_id: (row.guaranteed, row.borrow_limit) for row in rows}

    always = (at("2026-01-01T00:00"), None)
    QuotaGrant.objects.create(department=w.root, flavour=w.flavour, guaranteed=9000, during=always)
    QuotaGrant.objects.create(
        department=w.vision, flavour=w.flavour, guaranteed=4000, borrow_limit=2000, during=always
    )
    with set_clock(at("2026-05-01T00:00")):
        budget = set_for(w, amount_micro=100_000_000, stops=True)
        for_nobody = set_for(w, department=w.search, amount_micro=1_000_000, stops=True)
        assert limits_sweep() == 1
        before = {w.root.pk: (9000, None), w.vision.pk: (4000, 2000)}
        assert limits() == before
    w.lease(at("2026-05-02T00:00"), at("2026-05-02T09:59"))
    with set_clock(at("2026-05-03T00:00")):
        assert stopped_roots() == frozenset() and limits_sweep() == 0
    w.lease(at("2026-05-03T00:00"), at("2026-05-03T00:01"))
    w.lease(at("2026-05-03T00:00"), at("2026-05-03T01:00"), department=w.search)
    with set_clock(at("2026-05-04T00:00")):
        assert stopped_roots() == {w.vision.pk, w.search.pk}
        assert limits_sweep() == 1 and limits_sweep() == 0
        assert limits() == {**before, w.vision.pk: (4000, 0), w.search.pk: (0, 0)}
        budget_end(acting_user=SYSTEM, budget=budget)
        budget_end(acting_user=SYSTEM, budget=for_nobody)
        assert limits_sweep() == 1
        assert limits() == before
    with set_clock(at("2026-06-01T00:00")):
        assert list(budgets_in_force(date(2026, 6, 1))) == []


def test_a_new_budget_replaces_the_old_and_nonsense_is_refused(w: World) -> None:
    with set_clock(at("2026-05-01T00:00")):
        first = set_for(w)
        second = set_for(w, amount_micro=5)
        first.refresh_from_db()
        assert first.ended_at is not None and second.ended_at is None
        for wrong in (
            {"amount_micro": None},
            {"amount_micro": 0},
            {"amount_micro": -1},
            {"gpu_ms": 0},
            {"starts_on": date(2026, 5, 2)},
            {"period": "week"},
        ):
            with pytest.raises(Invalid):
                set_for(w, **wrong)
        with pytest.raises(DomainError):
            budget_set(
                acting_user=Actor(user=w.user),
                department=w.vision,
                period="month",
                starts_on=MAY,
                amount_micro=1,
                gpu_ms=None,
            )
        assert Budget.objects.count() == 2
    assert period_end("quarter", date(2026, 11, 1)) == date(2027, 2, 1)
    assert period_end("year", date(2024, 2, 1)) == date(2025, 2, 1)


def test_page_and_api_show_each_reader_their_own(w: World) -> None:
    with set_clock(at("2026-05-01T00:00")):
        set_for(w)
        set_for(w, department=w.search, amount_micro=7_000_000)
    client = Client()
    finance, lead = person("fin", ("finance", None)), person("lead", ("lead", w.vision))
    with set_clock(at("2026-05-03T12:00") + timedelta(seconds=1)):
        client.force_login(finance)
        client.cookies["django_language"] = "en"
        page = client.get(reverse("quotas:budgets"))
        assert (
            page.status_code == 200
            and "Vision" in page.content.decode()
            and "Search" in page.content.decode()
        )
        sent = client.post(
            reverse("quotas:budgets"),
            {
                "department": "search",
                "period": "year",
                "starts_on": "2026-05-01",
                "hours": "1000.5",
                "note": "plan",
            },
        )
        assert sent.status_code == 302
        assert Budget.objects.get(period="year").gpu_ms == 1000 * MS_PER_HOUR + MS_PER_HOUR // 2
        wrong = client.post(
            reverse("quotas:budgets"),
            {"department": "search", "period": "year", "starts_on": "2026-05-01", "note": "x"},
        )
        assert wrong.status_code == 400 and Budget.objects.count() == 3
        client.force_login(lead)
        found = client.get("/api/v1/budgets/").json()
        assert [row["department"] for row in found["results"]] == ["vision"]
        assert found["results"][0]["measures"][0]["used"] == 0
        refused = client.post(reverse("quotas:budgets"), {"department": "vision"})
        assert refused.status_code == 403
        client.force_login(w.user)
        assert client.get(reverse("quotas:budgets")).status_code == 403
        assert client.get("/api/v1/budgets/").status_code == 403


def test_what_a_month_would_have_cost_at_another_price(w: World) -> None:
    w.lease(at("2026-04-10T00:00"), at("2026-04-10T10:00"))
    w.lease(at("2026-04-10T00:00"), at("2026-04-10T00:01"), department=w.search, charge=333, site="bj")
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    form = {"flavour": w.flavour.pk, "price": "12.5", "reason": "x", "preview": "1"}
    with set_clock(at("2026-05-02T00:00")):
        page = client.post(reverse("quotas:prices"), form)
        sited = price_preview(
            flavour=w.flavour,
            micro_per_gpu_hour=12_500_001,
            site="bj",
            month=date(2026, 4, 1),
            tree=DepartmentTree.load(),
        )
    assert page.status_code == 200 and PriceRate.objects.count() == 1
    preview = page.context["preview"]
    # a minute at 333 milli: 19,980 GPU-ms
    assert [(row.name, row.was, row.would) for row in preview.rows] == [
        ("Lab / Vision", 100_000_000, 125_000_000),
        ("Lab / Search", 55_500, 69_375),
    ]
    assert preview.difference == 25_013_875
    assert "¥125.00" in page.content.decode()
    assert [(row.was, row.would) for row in sited.rows] == [(55_500, cost_micro(19_980, 12_500_001))]
