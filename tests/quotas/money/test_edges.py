"""The edges of the books: leap days, a budget that holds work back and says so to who waits."""

from __future__ import annotations

from datetime import date

import pytest
from django.test import Client
from django.urls import reverse

from portal.accounts.policy import DepartmentTree, policy_of
from portal.kernel.clock import set_clock
from portal.kernel.errors import Invalid
from portal.ops.actor import SYSTEM
from quotas.models import CapacityRequest, LedgerEntry
from quotas.selectors.budgets import stopping_budget
from quotas.selectors.money import LineFilter
from quotas.selectors.month_report import month_report
from quotas.services.budgets import budget_end, budget_set, period_end
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db


@pytest.fixture
def w() -> World:
    made = world()
    made.price("10", at("2026-01-01T00:00"))
    return made


def test_a_leap_day_is_a_day_of_its_own_and_compares_with_the_days_there_are(w: World) -> None:
    w.lease(at("2028-02-28T12:00"), at("2028-03-01T12:00"))
    w.lease(at("2028-03-31T00:00"), at("2028-03-31T06:00"))
    days = list(LedgerEntry.objects.order_by("local_day").values_list("local_day", "gpu_ms"))
    hour = 3_600_000
    assert days == [
        (date(2028, 2, 28), 12 * hour), (date(2028, 2, 29), 24 * hour), (date(2028, 3, 1), 12 * hour),
        (date(2028, 3, 31), 6 * hour),
    ]  # fmt: skip
    policy = policy_of(person("fin", ("finance", None)))
    with set_clock(at("2028-03-31T12:00")):
        february = month_report(policy, LineFilter(month=date(2028, 2, 1)), "department")
        march = month_report(policy, LineFilter(month=date(2028, 3, 1)), "department")
    assert len(february.days) == 29 and february.total.amount_micro == 360_000_000
    # 31 March noon against February: all of its days before the 29th, and half of the 29th
    assert march.before.amount_micro == 120_000_000 + 120_000_000
    assert march.total.amount_micro == 180_000_000
    assert period_end("year", date(2028, 2, 1)) == date(2029, 2, 1)


def test_an_early_month_is_compared_with_the_same_hours_of_the_month_before(w: World) -> None:
    """Six hours into May against six hours of 1 April, not against the whole day or month."""
    w.lease(at("2026-04-01T00:00"), at("2026-04-03T00:00"))
    w.lease(at("2026-05-01T00:00"), None)
    policy = policy_of(person("fin", ("finance", None)))
    with set_clock(at("2026-05-01T06:00")):
        report = month_report(policy, LineFilter(month=date(2026, 5, 1)), "department")
    assert report.total.amount_micro == 60_000_000
    assert report.before.amount_micro == 60_000_000 and report.change_percent == 0
    assert report.before_whole.amount_micro == 480_000_000


def test_who_waits_is_told_of_a_budget_that_stops(w: World) -> None:
    tree = DepartmentTree.load()
    with set_clock(at("2026-05-01T00:00")):
        above = budget_set(
            acting_user=SYSTEM, department=w.root, period="month", starts_on=date(2026, 5, 1),
            amount_micro=50_000_000, gpu_ms=None, stops=True,
        )  # fmt: skip
        budget_set(
            acting_user=SYSTEM, department=w.search, period="month", starts_on=date(2026, 5, 1),
            amount_micro=1_000_000_000, gpu_ms=None, stops=True,
        )  # fmt: skip
    request = w.request()
    CapacityRequest.objects.filter(pk=request.pk).update(state="queued", queued_at=at("2026-05-02T00:00"))
    client = Client()
    client.force_login(w.user)
    client.cookies["django_language"] = "en"
    address = reverse("quotas:request-detail", args=[request.uid])
    words = "The budget of Lab is used up: nothing above the guarantee starts before 2026-06-01."
    with set_clock(at("2026-05-02T00:00")):
        assert stopping_budget(w.vision.pk, tree) is None
        assert words not in client.get(address).content.decode()
    w.lease(at("2026-05-02T00:00"), at("2026-05-02T06:00"), department=w.search)
    with set_clock(at("2026-05-03T00:00")):
        assert stopping_budget(w.vision.pk, tree) == stopping_budget(w.search.pk, tree) == above
        assert words in client.get(address).content.decode()
        budget_end(acting_user=SYSTEM, budget=above)
        assert stopping_budget(w.vision.pk, tree) is None
        assert words not in client.get(address).content.decode()


@pytest.mark.parametrize("text", ["2026-00", "2026-13", "02-2026", "1899-12", "2200-01", "2026-2"])
def test_a_month_that_is_none_is_refused(text: str) -> None:
    from quotas.selectors.money import month_from

    with pytest.raises(Invalid):
        month_from(text)
