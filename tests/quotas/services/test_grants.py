"""Grants, their sums, what follows from lower numbers, quota changes, lending, import."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from portal.kernel.clock import set_clock
from portal.kernel.errors import Blocked, Conflict, Invalid, Refused
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.engine.tree import QuotaNode, QuotaTree
from quotas.models import QuotaChange, QuotaGrant, QuotaUsage
from quotas.selectors.grants import GrantNumbers
from quotas.selectors.requests import lent_now, quota_bar
from quotas.selectors.trees import quota_trees
from quotas.services.approvals import open_step_of, step_decide
from quotas.services.grant_import import quotas_import
from quotas.services.grants import grant_set, limits_sweep
from quotas.services.quota_changes import lending_submit, quota_change_submit, quota_change_withdraw
from quotas.services.usage import quota_debit
from tests.quotas import build

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture
def world():
    return World()


class World:
    """A top department with two below, one flavour of 64, an administrator and leads."""

    def __init__(self):
        self.top = build.department("top", name="Top")
        self.a = build.department("a", self.top, name="A")
        self.b = build.department("b", self.top, name="B")
        self.flavour = build.flavour("f", installed=64)
        self.admin, self.second = build.user("admin"), build.user("admin2")
        build.role(self.admin, "pool_admin")
        build.role(self.second, "pool_admin")
        self.lead = build.user("lead")
        build.role(self.lead, "lead", self.a)
        self.lender = build.user("lender")
        build.role(self.lender, "lead", self.b)
        self.high = build.user("high")
        build.role(self.high, "lead", self.top)

    def set(self, where, guaranteed, who=None, **values):
        who = who or self.admin
        return grant_set(
            acting_user=build.actor(who), policy=build.policy(who), department=where, flavour=self.flavour,
            guaranteed=guaranteed * 1000, **values,
        )  # fmt: skip

    def row(self, where):
        return QuotaUsage.objects.get(department=where, flavour=self.flavour)

    def bar(self, where):
        return quota_bar(quota_trees([self.flavour.pk])[self.flavour.pk], self.flavour, where.pk)


def test_limits_are_copied_to_the_usage_row_in_the_same_transaction(world):
    world.set(world.top, 40, borrow_limit=8000, hard_cap=60_000, reason="June")
    row = world.row(world.top)
    assert (row.guaranteed, row.borrow_limit, row.lend_limit, row.hard_cap, row.weight, row.granted) == (
        40_000, 8000, None, 60_000, 1, True,
    )  # fmt: skip
    audit = AuditEvent.objects.get(action="quota.grant_set")
    assert (audit.after["guaranteed"], audit.reason, audit.department_id) == (40_000, "June", world.top.pk)
    assert OutboxEvent.objects.filter(topic="quotas.limits_changed").count() == 1


def test_sum_of_children_above_the_parent_is_refused_unless_overridden(world):
    world.set(world.top, 40)
    world.set(world.a, 30)
    with pytest.raises(Conflict) as error:
        world.set(world.b, 11)
    assert error.value.code == "quota_sum"
    assert error.value.blocking == {"level": "Top", "limit": 40_000, "used": 0, "requested": 41_000}
    assert not QuotaGrant.objects.filter(department=world.b).exists()
    done = world.set(world.b, 11, override=True)
    assert done.warnings == ["Top: the guarantees below it sum to 41, more than its own 40."]
    assert AuditEvent.objects.latest("id").after["overridden"] == done.warnings
    with pytest.raises(Conflict):
        world.set(world.top, 20)


def test_more_than_installed_is_refused(world):
    with pytest.raises(Conflict) as error:
        world.set(world.top, 65)
    assert str(error.value.detail) == "65 guaranteed in all, more than the 64 installed."


@pytest.mark.parametrize(
    "values", [{"guaranteed": -1}, {"borrow_limit": -1}, {"hard_cap": 1}, {"weight": -1}]
)
def test_amounts_that_make_no_sense(world, values):
    values = {"guaranteed": 40, **values}
    with pytest.raises(Invalid):
        world.set(world.top, **values)
    assert not QuotaGrant.objects.exists()


def test_only_administrators_of_the_place_may(world):
    for who in (world.lead, world.high, build.user()):
        with pytest.raises(Refused):
            world.set(world.a, 1, who=who)
    bound = build.user()
    build.role(bound, "pool_admin", world.a)
    world.set(world.a, 1, who=bound)
    with pytest.raises(Refused):
        world.set(world.b, 1, who=bound)


def test_P004_lowering_stops_nothing_and_says_over_by(world):
    args = {"department_id": world.a.pk, "flavour_id": world.flavour.pk, "interruptible": True}
    world.set(world.a, 8, borrow_limit=0)
    quota_debit(**args, charge_milli=6000)
    world.set(world.a, 4, borrow_limit=0)
    bar = world.bar(world.a)
    assert (bar.used, bar.guaranteed, bar.over, bar.borrowed, bar.available) == (6000, 4000, 2000, 0, 0)
    with pytest.raises(Blocked):
        quota_debit(**args, charge_milli=1)
    assert world.row(world.a).total == 6000


def test_P011_empty_means_unlimited_and_0_none(world):
    world.set(world.a, 8, borrow_limit=None, lend_limit=None, hard_cap=None)
    assert world.bar(world.a).limit is None
    world.set(world.a, 8, borrow_limit=0)
    assert world.bar(world.a).limit == 8000


def test_validity_is_cut_not_overwritten(world):
    with set_clock(T):
        world.set(world.a, 8)
    with set_clock(T + timedelta(days=1)):
        world.set(world.a, 12, starts_at=T + timedelta(days=10), ends_at=T + timedelta(days=20))
        assert world.row(world.a).guaranteed == 8000  # not yet
    spans = [
        (g.guaranteed, g.during.lower, g.during.upper)
        for g in QuotaGrant.objects.filter(department=world.a).order_by("during")
    ]
    assert spans == [
        (8000, T, T + timedelta(days=10)),
        (12_000, T + timedelta(days=10), T + timedelta(days=20)),
        (8000, T + timedelta(days=20), None),
    ]
    for day, guaranteed, changed in ((9, 8000, 0), (10, 12_000, 1), (10, 12_000, 0), (25, 8000, 1)):
        with set_clock(T + timedelta(days=day)):
            assert limits_sweep() == changed  # also after a missed night
        assert world.row(world.a).guaranteed == guaranteed


def test_numbers_that_somebody_changed_meanwhile(world):
    world.set(world.a, 8)
    with pytest.raises(Conflict) as error:
        world.set(world.a, 9, expect=GrantNumbers(7000))
    assert error.value.code == "version_changed"
    world.set(world.a, 9, expect=GrantNumbers(8000))


def decide(who, change, decision="approve", **values):
    step_decide(
        acting_user=build.actor(who),
        policy=build.policy(who),
        step=open_step_of(change),
        decision=decision,
        **values,
    )
    change.refresh_from_db()


def ask(world, who=None, **values):
    who = who or world.lead
    return quota_change_submit(
        acting_user=build.actor(who), policy=build.policy(who), department=world.a, flavour=world.flavour,
        asked=values.pop("asked", GrantNumbers(16_000)), purpose=values.pop("purpose", "July release"), **values,
    )  # fmt: skip


def test_P038_a_quota_change_keeps_old_asked_granted_and_who(world):
    world.set(world.a, 8)
    change = ask(world)
    assert [(s.role, s.department) for s in change.steps.order_by("position")] == [
        ("lead", world.top), ("pool_admin", None),
    ]  # fmt: skip
    decide(world.high, change, comment="yes")
    assert (change.state, world.row(world.a).guaranteed) == ("in_approval", 8000)
    decide(world.admin, change)
    assert (change.state, change.old["guaranteed"], change.asked["guaranteed"], change.granted["guaranteed"]) == (
        "approved", 8000, 16_000, 16_000,
    )  # fmt: skip
    assert world.row(world.a).guaranteed == 16_000
    assert [(s.decided_by, s.comment) for s in change.steps.order_by("position")] == [
        (world.high, "yes"), (world.admin, ""),
    ]  # fmt: skip


def test_an_administrator_who_asks_does_not_decide(world):
    change = ask(world, who=world.admin)
    decide(world.lead, change) if open_step_of(change).department == world.a else decide(world.high, change)
    with pytest.raises(Refused) as error:
        decide(world.admin, change)
    assert error.value.code == "self_approval"
    decide(world.second, change)
    assert change.state == "approved"


def test_a_change_whose_sums_do_not_add_up_stays_open_until_overridden(world):
    world.set(world.top, 10)
    with pytest.raises(Conflict) as refused:
        ask(world)
    assert (refused.value.code, refused.value.blocking["limit"], refused.value.blocking["requested"]) == (
        "quota_sum", 10_000, 16_000,
    )  # fmt: skip
    assert not QuotaChange.objects.exists()
    change = ask(world, override=True)
    decide(world.high, change)
    with pytest.raises(Conflict) as error:
        decide(world.admin, change)
    assert error.value.extra["overridable"] is True
    change.refresh_from_db()
    assert (change.state, open_step_of(change).role) == ("in_approval", "pool_admin")
    decide(world.admin, change, override=True)
    assert (change.state, world.row(world.a).guaranteed) == ("approved", 16_000)


def test_P035_a_change_needs_its_reason_and_something_to_change(world):
    world.set(world.a, 16)
    for values in ({"purpose": " "}, {}):
        with pytest.raises(Invalid):
            ask(world, **values)
    with pytest.raises(Invalid) as too_long:
        ask(world, purpose="x" * 2001, asked=GrantNumbers(17_000))
    assert [p["pointer"] for p in too_long.value.errors] == ["purpose"]
    with pytest.raises(Invalid) as too_long:
        world.set(world.a, 17, reason="x" * 1001)
    assert [p["pointer"] for p in too_long.value.errors] == ["reason"]
    assert (QuotaChange.objects.count(), world.row(world.a).guaranteed) == (0, 16_000)
    with pytest.raises(Refused):
        quota_change_submit(
            acting_user=build.actor(world.lead), policy=build.policy(world.lead), department=world.b,
            flavour=world.flavour, asked=GrantNumbers(1000), purpose="x",
        )  # fmt: skip


def test_reject_and_withdraw_change_nothing(world):
    world.set(world.a, 8)
    first, second = ask(world), ask(world)
    decide(world.high, first, "reject", comment="no room")
    quota_change_withdraw(acting_user=build.actor(world.lead), policy=build.policy(world.lead), change=second)
    second.refresh_from_db()
    assert (first.state, second.state, world.row(world.a).guaranteed) == ("rejected", "withdrawn", 8000)


def test_lending_for_a_period_and_back(world):
    with set_clock(T):
        world.set(world.top, 40)
        world.set(world.a, 16)
        world.set(world.b, 16)
        change = lending_submit(
            acting_user=build.actor(world.lead), policy=build.policy(world.lead), department=world.a, lender=world.b,
            flavour=world.flavour, amount_milli=4000, purpose="release", starts_at=None, ends_at=T + timedelta(days=7),
        )  # fmt: skip
        steps = list(change.steps.order_by("position").values_list("role", "department__code"))
        assert steps == [("lead", "b"), ("lead", "top"), ("pool_admin", None)]
        for who in (world.lender, world.high, world.admin):
            decide(who, change)
        assert change.state == "approved"
        assert (world.row(world.a).guaranteed, world.row(world.b).guaranteed) == (20_000, 12_000)
        grant = QuotaGrant.objects.get(department=world.a, during__contains=T)
        assert grant.lent_from.department == world.b
    with set_clock(T + timedelta(days=8)):
        limits_sweep()
        assert (world.row(world.a).guaranteed, world.row(world.b).guaranteed) == (16_000, 16_000)


CSV = "department,flavour,guaranteed,borrow_limit,hard_cap\ntop,f,40,,\na,f,24,8,32\nb,f,16,0,\n"


def load(world, text, dry_run=False, who=None):
    who = who or world.admin
    return quotas_import(
        acting_user=build.actor(who),
        policy=build.policy(who),
        data=text.encode(),
        name="q.csv",
        dry_run=dry_run,
    )


def test_import_dry_run_then_all(world):
    result = load(world, CSV, dry_run=True)
    assert (len(result.rows), QuotaGrant.objects.count()) == (3, 0)
    load(world, "\ufeff" + CSV)
    row = world.row(world.a)
    assert (row.guaranteed, row.borrow_limit, row.hard_cap) == (24_000, 8000, 32_000)
    assert world.row(world.b).borrow_limit == 0
    load(world, CSV)
    assert QuotaGrant.objects.count() == 3  # nothing changed, nothing set anew


def test_import_by_command(world, tmp_path):
    file = tmp_path / "q.csv"
    file.write_text(CSV, encoding="utf-8")
    call_command("import_quotas", str(file), "--dry-run")
    assert not QuotaGrant.objects.exists()
    said = io.StringIO()
    call_command("import_quotas", str(file), stdout=said)
    assert "3 quotas set" in said.getvalue()
    assert QuotaGrant.objects.get(department=world.a).granted_by_name == "import_quotas"
    file.write_text("department,flavour,guaranteed\na,f,much\n", encoding="utf-8")
    problems = io.StringIO()
    with pytest.raises(CommandError):
        call_command("import_quotas", str(file), stderr=problems)
    assert problems.getvalue().startswith("2/guaranteed: ")
    with pytest.raises(CommandError):
        call_command("import_quotas", str(tmp_path / "none.csv"))
    assert world.row(world.a).guaranteed == 24_000


def test_import_tells_errors_by_row_and_column_and_takes_nothing(world):
    with pytest.raises(Invalid) as error:
        load(world, "department,flavour,guaranteed,hard_cap\na,f,4,\nx,g,-1,\nb,f,much,1\na,f,,0\n")
    assert [p["pointer"] for p in error.value.errors] == [
        "3/department", "3/flavour", "3/guaranteed", "4/guaranteed", "5/guaranteed", "5/department",
    ]  # fmt: skip
    with pytest.raises(Conflict):
        load(world, "department,flavour,guaranteed\ntop,f,10\na,f,24\n")
    with pytest.raises(Refused):
        load(world, CSV, who=world.lead)
    assert not QuotaGrant.objects.exists()


def test_the_figures_of_the_quota_page_add_up():
    """The invented organisation of the design: 192 installed, 16 borrowed = 8 of the site + 8 lent by
    departments.
    """
    nodes = [QuotaNode(0, None, 192)]
    figures = {1: (0, 96, 112), 2: (0, 40, 36), 3: (0, 16, 4), 4: (0, 24, 16), 5: (0, 8, 4)}
    for pk, (parent, guarantee, _used) in figures.items():
        nodes.append(QuotaNode(pk, parent, guarantee, lend_limit=8 if pk == 4 else None))
    tree = QuotaTree(nodes)
    for pk, (_parent, _guarantee, used) in figures.items():
        tree.add(pk, used)
    assert sum(lent_now(tree).values()) == 8


class Lending(TestCase):
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.none() | st.integers(0, 4000)),
            min_size=1,
            max_size=6,
        ),
        st.integers(0, 20_000),
    )
    def test_borrowed_is_own_free_part_plus_lent(self, children, extra):
        guarantee = sum(c[0] for c in children) + extra
        nodes = [QuotaNode(0, None, guarantee)]
        nodes += [QuotaNode(n, 0, g, lend_limit=lend) for n, (g, _u, lend) in enumerate(children, 1)]
        tree = QuotaTree(nodes)
        for n, (_g, used, _lend) in enumerate(children, 1):
            tree.add(n, used)
        lent = lent_now(tree)
        borrowed = sum(max(0, u - g) for g, u, _l in children)
        can = [max(0, g - u) if lend is None else min(max(0, g - u), lend) for g, u, lend in children]
        assert all(0 <= lent.get(n, 0) <= most for n, most in enumerate(can, 1))
        assert sum(lent.values()) == min(max(0, borrowed - extra), sum(can))
