"""Debits and releases: exact sums, refusals with their figures, races, and the invariants under random
histories.
"""

from __future__ import annotations

import threading

import pytest
from django.db import connection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from portal.kernel.errors import Blocked, Conflict, DomainError, Invalid, NotFound
from quotas.models import QuotaUsage
from quotas.selectors.trees import INSTALLATION, quota_trees
from quotas.services.usage import quota_debit, quota_release, usage_lock, usage_recompute
from tests.quotas import build


def rows(flavour) -> dict[str, tuple[int, int, int, int]]:
    found = QuotaUsage.objects.filter(flavour=flavour).select_related("department")
    return {r.department.code: (r.direct, r.charged, r.total, r.total_noninterruptible) for r in found}


@pytest.mark.django_db
def test_debit_books_the_whole_path_and_release_undoes_it():
    top = build.department("top")
    leaf = build.department("leaf", top)
    flavour = build.flavour(installed=16)
    build.limits(top, flavour, 8)
    build.limits(leaf, flavour, 4)
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk}

    quota_debit(**args, charge_milli=3000, interruptible=False)
    quota_debit(**args, charge_milli=500, interruptible=True)

    assert rows(flavour) == {"top": (0, 3500, 3500, 3000), "leaf": (3500, 3500, 3500, 3000)}
    quota_release(**args, charge_milli=3000, interruptible=False)
    assert rows(flavour) == {"top": (0, 500, 500, 0), "leaf": (500, 500, 500, 0)}
    quota_release(**args, charge_milli=500, interruptible=True)
    assert set(rows(flavour).values()) == {(0, 0, 0, 0)}


@pytest.mark.django_db
def test_refusal_names_level_and_sum_and_writes_nothing():
    top = build.department("top", name="Vision")
    leaf = build.department("leaf", top, name="Video")
    flavour = build.flavour(installed=64)
    build.limits(top, flavour, 40)
    build.limits(leaf, flavour, 24, hard_cap=32)
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk}
    quota_debit(**args, charge_milli=22_000, interruptible=True)

    with pytest.raises(Blocked) as refusal:
        quota_debit(**args, charge_milli=16_000, interruptible=True)

    assert refusal.value.status == 409
    assert refusal.value.blocking == {"level": "Video", "limit": 32_000, "used": 22_000, "requested": 16_000}
    assert refusal.value.extra["rule"] == "hard_cap"
    assert str(refusal.value.detail) == "Video: 22 used + 16 asked > hard cap 32."
    assert rows(flavour)["leaf"] == (22_000, 22_000, 22_000, 0)


@pytest.mark.django_db
def test_uninterruptible_work_stays_within_the_guarantee_on_every_level():
    leaf = build.department("leaf")
    flavour = build.flavour(installed=64)
    build.limits(leaf, flavour, 4)
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk}
    quota_debit(**args, charge_milli=4000, interruptible=True)
    quota_debit(**args, charge_milli=4000, interruptible=False)
    with pytest.raises(Blocked) as refusal:
        quota_debit(**args, charge_milli=1, interruptible=False)
    assert refusal.value.extra["rule"] == "guarantee"
    assert refusal.value.blocking == {"level": "Leaf", "limit": 4000, "used": 4000, "requested": 1}


@pytest.mark.django_db
def test_without_any_grant_interruptible_work_borrows_what_is_installed_and_not_more():
    leaf = build.department()
    flavour = build.flavour(installed=2)
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk}
    quota_debit(**args, charge_milli=2000, interruptible=True)
    with pytest.raises(Blocked) as refusal:
        quota_debit(**args, charge_milli=1, interruptible=True)
    assert refusal.value.blocking == {
        "level": "The installation",
        "limit": 2000,
        "used": 2000,
        "requested": 1,
    }


@pytest.mark.django_db
def test_a_department_between_without_a_grant_holds_its_childrens_sum():
    top = build.department()
    leaf = build.department(parent=top)
    flavour = build.flavour(installed=8)
    build.limits(leaf, flavour, 8)
    quota_debit(department_id=leaf.pk, flavour_id=flavour.pk, charge_milli=8000, interruptible=False)
    tree = quota_trees([flavour.pk])[flavour.pk]
    assert tree.guarantee(top.pk) == 8000
    assert tree.own[INSTALLATION] == 0


@pytest.mark.django_db
def test_amounts_and_ids_that_make_no_sense_are_refused():
    leaf = build.department()
    flavour = build.flavour()
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk, "interruptible": True}
    with pytest.raises(Invalid):
        quota_debit(**args, charge_milli=-1)
    with pytest.raises(Conflict) as refusal:
        quota_release(**args, charge_milli=1)
    assert refusal.value.code == "quota_release_without_use"
    with pytest.raises(NotFound):
        quota_debit(department_id=0, flavour_id=flavour.pk, charge_milli=1, interruptible=True)
    with pytest.raises(NotFound):
        quota_debit(department_id=leaf.pk, flavour_id=0, charge_milli=1, interruptible=True)
    quota_debit(**args, charge_milli=0)
    assert all(row == (0, 0, 0, 0) for row in rows(flavour).values())


@pytest.mark.django_db
def test_a_release_of_the_other_kind_is_refused():
    leaf = build.department()
    flavour = build.flavour()
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk}
    quota_debit(**args, charge_milli=1000, interruptible=True)
    with pytest.raises(Conflict):
        quota_release(**args, charge_milli=1000, interruptible=False)
    assert rows(flavour)[leaf.code] == (1000, 1000, 1000, 0)


@pytest.mark.django_db
def test_a_moved_department_carries_its_use_along():
    old, new = build.department("old"), build.department("new")
    leaf = build.department("leaf", old)
    flavour = build.flavour()
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk, "interruptible": True}
    quota_debit(**args, charge_milli=3000)
    leaf.parent = new
    leaf.save()
    assert usage_recompute(flavour_id=flavour.pk) == 2
    assert rows(flavour)["old"] == (0, 0, 0, 0)
    assert rows(flavour)["new"] == (0, 3000, 3000, 0)
    assert usage_recompute(flavour_id=flavour.pk) == 0
    quota_release(**args, charge_milli=3000)
    assert set(rows(flavour).values()) == {(0, 0, 0, 0)}


@pytest.mark.django_db
def test_lock_gives_the_path_from_root_to_leaf_and_needs_a_transaction():
    top = build.department()
    middle = build.department(parent=top)
    leaf = build.department(parent=middle)
    flavour = build.flavour()
    locked = usage_lock(department_id=leaf.pk, flavour_id=flavour.pk)
    assert [row.department_id for row in locked] == [top.pk, middle.pk, leaf.pk]


@pytest.mark.django_db(transaction=True)
def test_lock_outside_a_transaction_is_a_programming_error():
    leaf = build.department()
    flavour = build.flavour()
    with pytest.raises(RuntimeError):
        usage_lock(department_id=leaf.pk, flavour_id=flavour.pk)


def race(count, work):
    """Start ``count`` threads at one barrier; returns what each gave: a value or a DomainError."""
    barrier, out = threading.Barrier(count), []

    def run(n):
        try:
            barrier.wait()
            out.append(work(n))
        except DomainError as error:
            out.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.django_db(transaction=True)
def test_P001_24_threads_claim_8_gpus_and_exactly_8_get_one():
    top = build.department("top")
    leaves = [build.department(f"leaf{n}", top) for n in range(3)]
    flavour = build.flavour(installed=8)

    def claim(n):
        quota_debit(
            department_id=leaves[n % 3].pk, flavour_id=flavour.pk, charge_milli=1000, interruptible=True
        )
        return "got"

    out = race(24, claim)
    assert out.count("got") == 8
    assert sum(isinstance(x, Blocked) for x in out) == 16
    assert rows(flavour)["top"][2] == 8000
    # One of the leaves may have come too late with all of its claims: then it has no row.
    assert sum(row[0] for code, row in rows(flavour).items() if code.startswith("leaf")) == 8000


@pytest.mark.django_db(transaction=True)
def test_P010_a_release_delivered_twice_at_once_counts_once():
    leaf = build.department("leaf")
    flavour = build.flavour(installed=8)
    args = {"department_id": leaf.pk, "flavour_id": flavour.pk, "charge_milli": 1000, "interruptible": True}
    quota_debit(**args)
    out = race(6, lambda n: quota_release(**args))
    assert out.count(None) == 1
    assert rows(flavour)["leaf"] == (0, 0, 0, 0)


class Histories(RuleBasedStateMachine):
    """Random debits, releases, moves of departments and changes of limits, against a plain list of open
    debits.
    """

    def __init__(self):
        super().__init__()
        self.top = build.department()
        self.mid = build.department(parent=self.top)
        self.places = [
            self.top,
            self.mid,
            build.department(parent=self.mid),
            build.department(parent=self.top),
        ]
        self.flavour = build.flavour(installed=10)
        self.open: list[tuple[int, int, bool]] = []

    @rule(place=st.integers(0, 3), amount=st.integers(1, 6000), interruptible=st.booleans())
    def debit(self, place, amount, interruptible):
        where = self.places[place].pk
        try:
            quota_debit(
                department_id=where,
                flavour_id=self.flavour.pk,
                charge_milli=amount,
                interruptible=interruptible,
            )
        except Blocked as refusal:
            assert refusal.blocking["used"] + refusal.blocking["requested"] > refusal.blocking["limit"]
        else:
            self.open.append((where, amount, interruptible))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data):
        where, amount, interruptible = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        quota_release(
            department_id=where, flavour_id=self.flavour.pk, charge_milli=amount, interruptible=interruptible
        )

    @rule(
        place=st.integers(0, 3),
        guaranteed=st.integers(0, 6),
        borrow=st.none() | st.integers(0, 4),
        lend=st.none() | st.integers(0, 4),
        cap=st.none() | st.integers(0, 9),
    )
    def limit(self, place, guaranteed, borrow, lend, cap):
        build.limits(
            self.places[place], self.flavour, guaranteed, borrow_limit=borrow, lend_limit=lend, hard_cap=cap
        )
        usage_recompute(flavour_id=self.flavour.pk)

    @rule(under_top=st.booleans())
    def move(self, under_top):
        leaf = self.places[2]
        leaf.parent = self.top if under_top else self.mid
        leaf.save()
        usage_recompute(flavour_id=self.flavour.pk)

    @invariant()
    def counters_are_the_open_debits(self):
        stored = {r.department_id: r for r in QuotaUsage.objects.filter(flavour=self.flavour)}
        for place in self.places:
            row = stored.get(place.pk)
            mine = [d for d in self.open if d[0] == place.pk]
            assert (row.direct if row else 0) == sum(d[1] for d in mine)
            assert (row.direct_noninterruptible if row else 0) == sum(d[1] for d in mine if not d[2])
        tree = quota_trees([self.flavour.pk])[self.flavour.pk]
        for pk, row in stored.items():
            counters = tree.counters[pk]
            assert (row.charged, row.total, row.total_noninterruptible) == (
                counters.charged,
                counters.total,
                counters.total_noninterruptible,
            )
            assert min(row.charged, row.total, row.total_noninterruptible) >= 0
        assert tree.counters[INSTALLATION].total == sum(d[1] for d in self.open)


class HistoriesTest(TestCase):
    def runTest(self):
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(
            Histories,
            settings=settings(
                max_examples=15,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
