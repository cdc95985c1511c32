"""Two at once: administrators, moves, first sign-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from portal.accounts.models import Department, RoleBinding, User
from portal.accounts.policy import DepartmentTree
from portal.accounts.services import (
    department_move,
    first_admin_create,
    role_grant,
    role_withdraw,
    user_suspend,
)
from portal.kernel.errors import DomainError
from portal.notify.models import Delivery, Notification
from portal.notify.services import notify
from portal.ops.models import OutboxEvent
from tests.portal.builders import SYSTEM, actor, admin, binding, department, person

pytestmark = pytest.mark.django_db(transaction=True)


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Run all at once; each one's result or error."""
    barrier = threading.Barrier(len(acts))
    results: list[Any] = [None] * len(acts)

    def run(index: int, act: Callable[[], Any]) -> None:
        try:
            barrier.wait(10)
            results[index] = act()
        except DomainError as error:
            results[index] = error.code
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_two_administrators_cannot_take_each_other_out() -> None:
    a, b = admin("a"), admin("b")
    codes = together(
        lambda: role_withdraw(acting_user=actor(a), binding=binding(b)).pk and "done",
        lambda: role_withdraw(acting_user=actor(b), binding=binding(a)).pk and "done",
    )
    assert codes.count("done") == 1
    assert RoleBinding.objects.filter(role="pool_admin", valid_to=None).count() == 1


def test_nor_suspend_each_other() -> None:
    a, b = admin("a"), admin("b")
    codes = together(
        lambda: user_suspend(acting_user=actor(a), user=b, reason="x").pk and "done",
        lambda: user_suspend(acting_user=actor(b), user=a, reason="x").pk and "done",
    )
    assert codes.count("done") == 1
    assert User.objects.filter(is_active=True).count() == 1


def test_two_moves_cannot_make_a_cycle_together() -> None:
    a, b = department("a"), department("b")
    codes = together(
        lambda: department_move(acting_user=SYSTEM, department=a, parent=b).pk and "done",
        lambda: department_move(acting_user=SYSTEM, department=b, parent=a).pk and "done",
    )
    assert sorted(codes) == ["cycle", "done"]
    tree = DepartmentTree.load()
    assert len(tree.ordered()) == Department.objects.count() == 2


def test_one_role_is_bound_once() -> None:
    boss, user, home = admin(), person("x"), department("d")
    acts = [
        lambda: role_grant(acting_user=actor(boss), user=user, role="lead", department=home).pk and "done"
        for _n in range(6)
    ]
    codes = together(*acts)
    assert codes.count("done") == 1
    assert codes.count("role_held") == 5
    assert RoleBinding.objects.filter(user=user).count() == 1
    assert OutboxEvent.objects.filter(topic="accounts.role_granted", key="x").count() == 1


def test_two_first_starts_make_one_administrator() -> None:
    made = together(first_admin_create, first_admin_create, first_admin_create)
    assert [m.created for m in made].count(True) == 1
    assert User.objects.count() == 1


def test_a_sweep_that_runs_in_two_workers_tells_once() -> None:
    user, subject = person("x", email="x@qinghe.lan"), department("d")
    acts = [
        lambda: len(notify(user_ids=[user.pk], kind="t", subject=subject, threshold="2h")) for _n in range(6)
    ]
    assert sum(together(*acts)) == 1
    assert (Notification.objects.count(), Delivery.objects.count()) == (1, 1)
