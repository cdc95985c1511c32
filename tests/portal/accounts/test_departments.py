"""The department tree: moves, names over time, closing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from portal.accounts import effects
from portal.accounts.models import Department, DepartmentName
from portal.accounts.policy import DepartmentTree
from portal.accounts.services import (
    department_close,
    department_close_effects,
    department_create,
    department_move,
    department_rename,
    department_reopen,
    department_update,
)
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, Invalid, PreconditionFailed
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import QuotaUsage
from quotas.services.flavours import flavour_ensure
from tests.portal.builders import actor, admin, department, person

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def paths(row: Department) -> list[tuple[str, datetime | None, datetime | None]]:
    names = DepartmentName.objects.filter(department=row).order_by("during")
    return [(n.path, n.during.lower, n.during.upper) for n in names]


def state() -> tuple[Any, ...]:
    rows = list(
        Department.objects.without_tree_fields()
        .order_by("id")
        .values_list("id", "parent_id", "name", "closed_at", "version")
    )
    return rows, DepartmentName.objects.count(), AuditEvent.objects.count(), OutboxEvent.objects.count()


def test_names_and_paths_stay_as_they_were() -> None:
    boss = actor(admin())
    t1, t2 = T0 + timedelta(days=10), T0 + timedelta(days=20)
    with set_clock(T0):
        ai, ops = department("ai", name="AI"), department("ops", name="Ops")
        vision = department("vision", ai, "Vision")
        vg = department("vg", vision, "Video Generation")
    with set_clock(t1):
        department_rename(acting_user=boss, department=vision, name="Vision & Multimodal")
    with set_clock(t2):
        department_move(acting_user=boss, department=vision, parent=ops)
    assert paths(vg) == [
        ("AI / Vision / Video Generation", T0, t1),
        ("AI / Vision & Multimodal / Video Generation", t1, t2),
        ("Ops / Vision & Multimodal / Video Generation", t2, None),
    ]
    assert paths(ai) == [("AI", T0, None)]
    moved = OutboxEvent.objects.filter(topic="accounts.department_changed").latest("id").payload
    assert moved == {
        "department": str(vision.uid),
        "department_id": vision.pk,
        "change": "moved",
        "old_parent_id": ai.pk,
        "parent_id": ops.pk,
    }
    event = AuditEvent.objects.latest("id")
    assert (event.before, event.after) == (
        {"path": "AI / Vision & Multimodal"},
        {"path": "Ops / Vision & Multimodal"},
    )


def test_two_changes_at_one_instant_leave_one_name() -> None:
    boss = actor(admin())
    with set_clock(T0):
        ai = department("ai", name="AI")
        department_rename(acting_user=boss, department=ai, name="Intelligence")
    assert paths(ai) == [("Intelligence", T0, None)]


def test_a_cycle_is_refused_and_nothing_changes() -> None:
    boss = actor(admin())
    a = department("a")
    b = department("b", a)
    c = department("c", b)
    before = state()
    for target in (a, b, c):
        with pytest.raises(Conflict) as caught:
            department_move(acting_user=boss, department=a, parent=target)
        assert caught.value.code == "cycle"
    assert state() == before


def test_move_to_the_top_and_to_where_it_is() -> None:
    boss = actor(admin())
    a = department("a")
    b = department("b", a)
    department_move(acting_user=boss, department=b, parent=None)
    before = state()
    department_move(acting_user=boss, department=b, parent=None)
    assert state() == before
    assert DepartmentTree.load().path(b.pk) == "B"


def test_the_tree_is_ten_levels_deep_at_most() -> None:
    boss = actor(admin())
    row = None
    for n in range(10):
        row = department(f"d{n}", row)
    with pytest.raises(Invalid):
        department("d10", row)
    other = department("e0")
    department("e1", other)
    with pytest.raises(Invalid):
        department_move(acting_user=boss, department=other, parent=Department.objects.get(code="d8"))


@pytest.mark.parametrize(
    ("values", "pointer"),
    [
        ({"code": "Two Words"}, "code"),
        ({"code": ""}, "code"),
        ({"name": ""}, "name"),
        ({"name": "A / B"}, "name"),
        ({"name": "x" * 121}, "name"),
        ({"cost_center": "x" * 49}, "cost_center"),
        ({"position": -1}, "position"),
    ],
)
def test_wrong_fields(values: dict[str, Any], pointer: str) -> None:
    boss = actor(admin())
    before = state()
    with pytest.raises(Invalid) as caught:
        department_create(acting_user=boss, **{"code": "ok", "name": "Fine", **values})
    assert caught.value.errors[0]["pointer"] == pointer
    assert state() == before


def test_codes_and_sibling_names_are_unique() -> None:
    boss = actor(admin())
    a = department("a", name="Vision")
    before = state()
    for code, name, wrong in [("a", "Other", "code_taken"), ("b", "vision", "name_taken")]:
        with pytest.raises(Conflict) as caught:
            department_create(acting_user=boss, code=code, name=name)
        assert caught.value.code == wrong
    assert state() == before
    department("b", a, "Vision")


def test_close_lists_what_it_touches_and_refuses_what_is_in_the_way() -> None:
    boss = actor(admin())
    a = department("a")
    b = department("b", a)
    person("x", ("researcher", b), home_department=b)
    before = state()
    with pytest.raises(Conflict) as caught:
        department_close(acting_user=boss, department=a, reason="merged")
    assert caught.value.code == "in_the_way"
    assert caught.value.extra["in_the_way"] == [{"what": "Open departments below it", "count": 1}]
    assert state() == before
    assert [(str(e.label), e.count) for e in department_close_effects(b)][:3] == [
        ("Open departments below it", 0),
        ("People whose home it is", 1),
        ("Role bindings", 1),
    ]
    department_close(acting_user=boss, department=b, reason="merged")
    b.refresh_from_db()
    assert not b.is_open
    assert AuditEvent.objects.latest("id").after["touched"] == {
        "People whose home it is": 1,
        "Role bindings": 1,
    }
    with pytest.raises(Conflict):
        department("c", b)
    with pytest.raises(Conflict) as twice:
        department_close(acting_user=boss, department=b, reason="again")
    assert twice.value.code == "department_closed"
    department_reopen(acting_user=boss, department=b)
    b.refresh_from_db()
    assert b.is_open


def test_rooms_above_count_block_and_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    boss = actor(admin())
    a, b = department("a"), department("b")
    calls: list[tuple[int, int | None, int | None]] = []
    blocked = [1]
    monkeypatch.setattr(
        effects,
        "_department_counters",
        [lambda act, ids: [effects.Effect("open leases", blocked[0], blocks=act == "move")]],
    )
    monkeypatch.setattr(effects, "_moved", [lambda d, old, new: calls.append((d, old, new))])
    before = state()
    with pytest.raises(Conflict):
        department_move(acting_user=boss, department=b, parent=a)
    assert state() == before
    assert calls == []
    blocked[0] = 0
    department_move(acting_user=boss, department=b, parent=a)
    assert calls == [(b.pk, None, a.pk)]


def test_an_older_version_is_refused() -> None:
    boss = actor(admin())
    a = department("a")
    department_update(acting_user=boss, department=a, cost_center="CC-7", expected_version=1)
    before = state()
    with pytest.raises(PreconditionFailed):
        department_rename(acting_user=boss, department=a, name="Other", expected_version=1)
    assert state() == before


def test_use_follows_a_moved_department_in_its_own_transaction() -> None:
    boss = actor(admin())
    old, new = department("old"), department("new")
    moving = department("moving", old)
    flavour = flavour_ensure(model_name="NVIDIA H800", memory_mib=81559)
    usage = {"flavour": flavour, "updated_at": T0, "guaranteed": 0}
    QuotaUsage.objects.create(department=moving, direct=3000, total=3000, charged=3000, **usage)
    QuotaUsage.objects.create(department=old, total=3000, charged=3000, **usage)
    department_move(acting_user=boss, department=moving, parent=new)
    totals = {u.department.code: u.total for u in QuotaUsage.objects.select_related("department")}
    assert totals == {"moving": 3000, "new": 3000, "old": 0}
    assert {str(e.label): e.count for e in department_close_effects(moving)}["Open allocations"] == 0
