"""The sums that pages read: kept by the database with every line, equal to the lines, checked by the reconcile."""

from __future__ import annotations

import threading
from datetime import date, timedelta

import pytest
from django.db import connection, connections, transaction
from django.db.models import Count, Sum

from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from portal.ops.models import Incident
from quotas.models import LedgerEntry, LedgerSum, UsageSpan
from quotas.selectors import running
from quotas.selectors.money import LineFilter, Lines
from quotas.selectors.month_report import OTHERS, month_report
from quotas.selectors.running import one_look
from quotas.services.ledger import ledger_accrue, ledger_sums_merge, usage_span_close
from quotas.services.months import correction_book
from quotas.services.reconcile import reconcile
from quotas.web.money.month import chart
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)

KEY = (
    "booked_month", "local_day", "kind", "department_id_ref", "user_id_ref", "flavour_id", "site_code", "cost_code",
)  # fmt: skip


def lines_by_key() -> dict:
    rows = LedgerEntry.objects.values_list(*KEY).annotate(
        h=Sum("gpu_ms"), m=Sum("amount_micro"), n=Count("pk")
    )
    return {row[:-3]: row[-3:] for row in rows}


def sums_by_key() -> dict:
    rows = LedgerSum.objects.values_list(*KEY).annotate(
        h=Sum("gpu_ms"), m=Sum("amount_micro"), n=Sum("lines")
    )
    return {row[:-3]: row[-3:] for row in rows}


def busy_world() -> World:
    """Two departments, three leases over a month's end, a price change, a correction, one lease still open."""
    w = world()
    w.price("12", at("2026-05-01T00:00"))
    w.price("15.5", at("2026-05-30T12:00"))
    w.lease(at("2026-05-29T22:00"), at("2026-06-01T01:30"))
    w.lease(at("2026-05-29T22:00"), at("2026-05-29T23:00"), charge=333)
    w.lease(at("2026-05-30T08:00"), at("2026-05-30T20:00"), department=w.search, site="bj")
    w.lease(at("2026-05-31T10:00"), None, charge=500)
    with set_clock(at("2026-06-02T09:00")):
        ledger_accrue()
        line = LedgerEntry.objects.order_by("id").first()
        correction_book(
            acting_user=SYSTEM,
            entry_uid=line.uid,
            gpu_ms=-3_600_000,
            amount_micro=-12_000_000,
            reason="wrong",
        )
    return w


def test_every_insert_brings_its_sums_and_merging_changes_none() -> None:
    busy_world()
    lines = lines_by_key()
    assert sums_by_key() == lines
    assert LedgerSum.objects.count() > len(lines)
    written = ledger_sums_merge()
    assert written > 0
    assert sums_by_key() == lines
    assert LedgerSum.objects.count() == len(lines)
    assert ledger_sums_merge() == 0


def test_the_reconcile_tells_a_sum_that_is_not_that_of_its_lines() -> None:
    w = busy_world()
    w.counter(w.vision, 500)
    assert reconcile().differences == 0
    assert reconcile().summed_lines == LedgerEntry.objects.count()
    row = LedgerSum.objects.filter(department_id_ref=w.search.pk).first()
    LedgerSum.objects.filter(pk=row.pk).update(amount_micro=row.amount_micro + 1)
    found = reconcile()
    assert found.differences == 1
    assert found.sum_differences[0]["department"] == w.search.pk
    assert found.sum_differences[0]["amount_micro"] == [row.amount_micro, row.amount_micro + 1]
    incident = Incident.objects.get(kind="sums_differ")
    assert incident.state != "closed"
    LedgerSum.objects.filter(pk=row.pk).update(amount_micro=row.amount_micro)
    assert reconcile().differences == 0
    incident.refresh_from_db()
    assert incident.state == "closed"


def test_the_month_equals_its_lines_for_every_grouping_and_reader() -> None:
    w = busy_world()
    readers = [
        person("fin", ("finance", None)),
        person("lead", ("lead", w.vision)),
        w.user,
        person("alien", ("researcher", w.search)),
    ]
    with set_clock(at("2026-06-02T12:00")):
        for reader in readers:
            policy = policy_of(reader)
            for month in (date(2026, 5, 1), date(2026, 6, 1)):
                lines = list(Lines(policy, LineFilter(month=month)).all())
                before = set()
                for by in ("department", "flavour", "user", "site"):
                    report = month_report(policy, LineFilter(month=month), by)
                    assert report.total.lines == len(lines)
                    assert report.total.amount_micro == sum(line.amount_micro for line in lines)
                    assert report.total.gpu_ms == sum(line.gpu_ms for line in lines)
                    assert report.total.amount_micro == report.outside.amount_micro + sum(
                        report.money_of(day) for day in report.days
                    )
                    for day in report.days:
                        of_day = sum(line.amount_micro for line in lines if line.local_day == day)
                        assert report.money_of(day) == of_day
                    if by == "user":
                        for group in report.groups:
                            of_person = [line for line in lines if line.user_name == group.label]
                            assert group.total.lines == len(of_person)
                            days = report.by_day[group.key].values()
                            assert sum(d.gpu_ms for d in days) == sum(
                                line.gpu_ms for line in of_person if line.local_day in report.days
                            )
                    before.add(
                        (
                            report.before.gpu_ms,
                            report.before.amount_micro,
                            *sorted(report.before_by_day.items()),
                        )
                    )
                    corrected = [line for line in lines if line.kind == "correction"]
                    assert report.corrections.lines == len(corrected)
                    assert report.corrections.gpu_ms == sum(line.gpu_ms for line in corrected)
                # the day of the cut is shared out by group, each part rounded down: whole days are the same
                assert len({parts[2:] for parts in before}) == 1
                assert max(b[1] for b in before) - min(b[1] for b in before) < 5


def test_of_many_people_the_largest_have_days_of_their_own_and_the_rest_is_one() -> None:
    w = world()
    w.price("10", at("2026-05-01T00:00"))
    people = [person(f"p{n}") for n in range(9)]
    for n, who in enumerate(people):
        for day in (1, 20):
            w.lease(at(f"2026-05-{day:02d}T00:00"), at(f"2026-05-{day:02d}T00:00") + (n + 1) * HOUR, user=who)
    policy = policy_of(person("fin", ("finance", None)))
    with set_clock(at("2026-06-02T12:00")):
        may = month_report(policy, LineFilter(month=date(2026, 5, 1)), "user")
        june = month_report(policy, LineFilter(month=date(2026, 6, 1)), "user")
    assert [g.label for g in may.groups] == [f"p{n}" for n in range(8, -1, -1)]
    days = [date(2026, 5, 1), date(2026, 5, 20)]
    for n, group in enumerate(may.groups[:7]):
        assert {day: t.gpu_ms // 3_600_000 for day, t in may.by_day[group.key].items()} == dict.fromkeys(
            days, 9 - n
        )
    assert {day: t.gpu_ms // 3_600_000 for day, t in may.by_day[OTHERS].items()} == dict.fromkeys(days, 3)
    assert set(may.by_day) == {*(g.key for g in may.groups[:7]), OTHERS}
    figure = chart(may)
    assert sum(sum(trace["y"]) for trace in figure["data"]) == 90.0
    # 2 June noon against May: all of the first day, and half of the second, which had nothing
    assert (june.before.amount_micro, june.before_whole.amount_micro) == (450_000_000, 900_000_000)
    assert dict(june.before_by_day) == dict.fromkeys(days, 450_000_000)


def test_the_running_part_is_kept_for_seconds_and_never_past_a_booking() -> None:
    w = busy_world()
    lines = Lines(policy_of(person("fin", ("finance", None))), LineFilter())

    def shown() -> int:
        return sum(row.cut.gpu_ms for row in Lines(lines.policy, LineFilter()).running_cuts())

    with set_clock(at("2026-06-02T12:00:00")):
        first = shown()
        assert first == 12 * 1_800_000
    with set_clock(at("2026-06-02T12:00:04")):
        assert shown() == first
        assert Lines(lines.policy, LineFilter()).moment == at("2026-06-02T12:00:00")
        span = UsageSpan.objects.get(ended_at=None)
        usage_span_close(key=span.key, ended_at=at("2026-06-02T12:00:00"))
        assert shown() == 0
    with set_clock(at("2026-06-02T12:00:06")):
        later = w.lease(at("2026-06-02T12:00:05"))
        assert shown() == 1000
        w.price("20", at("2026-06-02T12:00:06"))
        assert shown() == 1000
    with set_clock(at("2026-06-02T12:00:08")):
        running._kept = None
        found = Lines(lines.policy, LineFilter()).running_cuts()
        assert [(row.cut.gpu_ms, row.cut.amount_micro) for row in found] == [(2000, 11_111), (1000, 4_306)]
        assert {row.span_id for row in found} == {later.pk}


@pytest.mark.django_db(transaction=True)
def test_one_look_counts_a_lease_once_while_it_is_booked_beside_it() -> None:
    w = world()
    w.price("10", at("2026-06-01T00:00"))
    span = w.lease(at("2026-06-02T10:00"))
    policy = policy_of(person("fin", ("finance", None)))

    def close() -> None:
        with set_clock(at("2026-06-02T12:00")):
            usage_span_close(key=span.key, ended_at=at("2026-06-02T12:00"))
        connections.close_all()

    with set_clock(at("2026-06-02T12:00")), one_look():
        lines = Lines(policy, LineFilter())
        booked_before = lines.sums().aggregate(h=Sum("gpu_ms", default=0))["h"]
        beside = threading.Thread(target=close)
        beside.start()
        beside.join()
        running_ms = sum(row.cut.gpu_ms for row in lines.running_cuts())
        booked_after = lines.sums().aggregate(h=Sum("gpu_ms", default=0))["h"]
    assert (booked_before, running_ms, booked_after) == (0, 7_200_000, 0)
    assert lines.sums().aggregate(h=Sum("gpu_ms"))["h"] == 7_200_000


@pytest.mark.django_db(transaction=True)
def test_two_bookings_of_one_key_do_not_wait_for_one_another() -> None:
    w = world()
    w.price("10", at("2026-06-01T00:00"))
    first, second = w.lease(at("2026-06-02T10:00")), w.lease(at("2026-06-02T10:00"))
    done = threading.Event()

    def close() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '2s'")
        with set_clock(at("2026-06-02T12:00")):
            usage_span_close(key=second.key, ended_at=at("2026-06-02T11:00"))
        done.set()
        connections.close_all()

    with set_clock(at("2026-06-02T12:00")), transaction.atomic():
        usage_span_close(key=first.key, ended_at=at("2026-06-02T11:00"))
        beside = threading.Thread(target=close)
        beside.start()
        beside.join()
        assert done.is_set()
    assert sums_by_key() == lines_by_key()
    assert LedgerSum.objects.aggregate(n=Sum("lines"))["n"] == 2
