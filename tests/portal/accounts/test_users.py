"""People: what services write, and that what they refuse changed nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from portal.accounts.models import ApiToken, RoleBinding, User
from portal.accounts.policy import policy_of
from portal.accounts.services import (
    first_admin_create,
    password_change,
    password_reset,
    preferences_save,
    role_grant,
    role_withdraw,
    token_create,
    user_create,
    user_reactivate,
    user_suspend,
    user_update,
)
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, DomainError, Invalid, PreconditionFailed, Refused
from portal.ops.models import AuditEvent, OutboxEvent
from tests.portal.builders import PASSWORD, SYSTEM, actor, admin, binding, client_of, department, person

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)


def counts() -> tuple[int, int, int, int]:
    return (
        User.objects.count(),
        RoleBinding.objects.count(),
        AuditEvent.objects.count(),
        OutboxEvent.objects.count(),
    )


def test_create_writes_the_person_and_one_audit_row() -> None:
    boss, home = admin(), department("vision")
    before = AuditEvent.objects.count()
    with set_clock(T0):
        user = user_create(
            acting_user=actor(boss),
            username=" Lin.Yue ",
            display_name="林月",
            email="lin.yue@qinghe.lan",
            home_department=home,
            system_account="linyue",
        )
    user.refresh_from_db()
    assert (user.username, user.display_name, user.node_account) == ("lin.yue", "林月", "linyue")
    assert (user.date_joined, user.is_active, user.must_change_password) == (T0, True, True)
    assert not user.has_usable_password()
    event = AuditEvent.objects.latest("id")
    assert AuditEvent.objects.count() == before + 1
    assert (event.action, event.actor_name, event.department_id) == ("user.created", "Zhao Rui", home.pk)
    assert event.after["username"] == "lin.yue"
    assert policy_of(user).roles == frozenset()


@pytest.mark.parametrize(
    ("values", "pointer"),
    [
        ({"username": "Lin Yue"}, "username"),
        ({"username": "-x"}, "username"),
        ({"username": "root"}, "username"),
        ({"username": "x" * 65}, "username"),
        ({"display_name": " "}, "display_name"),
        ({"email": "no mail"}, "email"),
        ({"system_account": "root"}, "system_account"),
        ({"system_account": "a b"}, "system_account"),
        ({"system_account": "a;rm"}, "system_account"),
        ({"language": "fr"}, "language"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"password": "short"}, "password"),
        ({"password": "1234567890123"}, "password"),
    ],
)
def test_wrong_fields_are_named_and_nothing_is_written(values: dict[str, Any], pointer: str) -> None:
    boss = admin()
    before = counts()
    with pytest.raises(Invalid) as caught:
        user_create(acting_user=actor(boss), **{"username": "gao.fei", "display_name": "Gao Fei", **values})
    assert [e["pointer"] for e in caught.value.errors][0] == pointer
    assert counts() == before


def test_a_taken_name_is_a_conflict_and_the_transaction_goes_on() -> None:
    boss = admin()
    person("lin.yue")
    before = counts()
    with pytest.raises(Conflict) as caught:
        user_create(acting_user=actor(boss), username="LIN.YUE", display_name="x")
    assert caught.value.code == "username_taken"
    assert counts() == before


@pytest.mark.parametrize("role", ["", "researcher", "lead", "finance", "auditor", "pool_admin"])
def test_only_administrators_of_the_installation_change_people(role: str) -> None:
    home = department("vision")
    someone = person("x", *([(role, home)] if role else []))
    other = person("y", ("researcher", home))
    before = counts()
    acts = [
        lambda: user_create(acting_user=actor(someone), username="z", display_name="Z"),
        lambda: user_update(acting_user=actor(someone), user=other, display_name="Z"),
        lambda: user_suspend(acting_user=actor(someone), user=other, reason="x"),
        lambda: password_reset(acting_user=actor(someone), user=other),
        lambda: role_grant(acting_user=actor(someone), user=someone, role="researcher", department=home),
        lambda: role_withdraw(acting_user=actor(someone), binding=binding(other)),
        lambda: preferences_save(acting_user=actor(someone), user=other, theme="dark"),
    ]
    for act in acts:
        with pytest.raises(Refused):
            act()
    assert counts() == before


def test_update_keeps_before_and_after_and_holds_the_version() -> None:
    boss, user = admin(), person("gao.fei", display_name="Gao Fei")
    fresh = user_update(acting_user=actor(boss), user=user, display_name="Gao Fei (VG)", expected_version=1)
    assert (fresh.display_name, fresh.version) == ("Gao Fei (VG)", 2)
    event = AuditEvent.objects.latest("id")
    assert (event.before, event.after) == ({"display_name": "Gao Fei"}, {"display_name": "Gao Fei (VG)"})
    before = counts()
    with pytest.raises(PreconditionFailed) as caught:
        user_update(acting_user=actor(boss), user=user, display_name="Other", expected_version=1)
    assert caught.value.extra == {"current_version": 2}
    user_update(acting_user=actor(boss), user=user, display_name="Gao Fei (VG)")
    assert counts() == before


def test_P022_suspension_ends_tokens_and_sessions_and_tells_the_pool() -> None:
    boss, home = admin(), department("vision")
    user = person("lin.yue", ("researcher", home), home_department=home)
    token, _value = token_create(acting_user=actor(user), user=user, name="laptop", scopes=["read"])
    browser = client_of(user)
    assert browser.get("/help/").context["user"].is_authenticated
    user_suspend(acting_user=actor(boss), user=user, reason="left the project")
    token.refresh_from_db()
    user.refresh_from_db()
    assert token.revoked_at is not None
    assert (user.is_active, user.session_generation) == (False, 1)
    assert not browser.get("/help/").context["user"].is_authenticated
    assert policy_of(user).roles == frozenset()
    event = OutboxEvent.objects.filter(topic="accounts.user_suspended").get()
    assert event.payload == {
        "user": str(user.uid),
        "user_id": user.pk,
        "leases": "end",
        "reason": "left the project",
    }
    audit = AuditEvent.objects.filter(action="user.suspended").get()
    assert audit.after == {"is_active": False, "tokens_revoked": 1, "leases": "end"}
    assert (audit.object_label, audit.reason) == ("Lin Yue", "left the project")
    again = user_reactivate(acting_user=actor(boss), user=user)
    assert policy_of(again).roles == {"researcher"}
    assert not browser.get("/help/").context["user"].is_authenticated, "the old session stays closed"
    assert ApiToken.objects.filter(user=user, revoked_at=None).count() == 0


def test_suspension_needs_a_reason_and_is_done_once() -> None:
    boss, user = admin(), person("x")
    before = counts()
    with pytest.raises(Invalid):
        user_suspend(acting_user=actor(boss), user=user, reason="  ")
    with pytest.raises(Conflict) as caught:
        user_suspend(acting_user=actor(boss), user=boss, reason="tired")
    assert caught.value.code == "self_suspend"
    assert counts() == before
    user_suspend(acting_user=actor(boss), user=user, reason="left")
    with pytest.raises(Conflict) as twice:
        user_suspend(acting_user=actor(boss), user=user, reason="left")
    assert twice.value.code == "user_suspended"
    assert OutboxEvent.objects.filter(topic="accounts.user_suspended").count() == 1


def test_the_last_administrator_stays() -> None:
    first, second = admin("a"), admin("b")
    role_withdraw(acting_user=actor(first), binding=binding(second))
    assert policy_of(second).roles == frozenset()
    before = counts()
    for act in (
        lambda: role_withdraw(acting_user=actor(first), binding=binding(first)),
        lambda: role_withdraw(acting_user=SYSTEM, binding=binding(first)),
        lambda: user_suspend(acting_user=SYSTEM, user=first, reason="x"),
    ):
        with pytest.raises(Conflict) as caught:
            act()
        assert caught.value.code == "last_administrator"
    assert counts() == before
    assert policy_of(first).administers_people


def test_an_administrator_with_an_end_is_no_last_one() -> None:
    first = admin("a")
    other = person("b")
    role_grant(
        acting_user=actor(first), user=other, role="pool_admin", valid_to=datetime(2099, 1, 1, tzinfo=UTC)
    )
    with pytest.raises(Conflict):
        role_withdraw(acting_user=actor(other), binding=binding(first))


def test_nobody_gives_himself_a_role_over_others() -> None:
    boss, home = admin(), department("vision")
    before = counts()
    for role in ("lead", "finance", "auditor", "pool_admin"):
        with pytest.raises(Refused) as caught:
            role_grant(acting_user=actor(boss), user=boss, role=role, department=home)
        assert caught.value.code == "self_grant"
    assert counts() == before
    role_grant(acting_user=actor(boss), user=boss, role="researcher", department=home)
    assert policy_of(boss).roles == {"pool_admin", "researcher"}


def test_roles_hold_for_their_time_and_their_subtree() -> None:
    boss = admin()
    top = department("ai")
    low = department("vg", parent=top)
    user = person("chen.hao")
    with set_clock(T0):
        bound = role_grant(
            acting_user=actor(boss),
            user=user,
            role="lead",
            department=top,
            valid_from=T0 + timedelta(days=1),
            valid_to=T0 + timedelta(days=2),
        )
        assert policy_of(user).roles == frozenset()
    with set_clock(T0 + timedelta(days=1)):
        assert policy_of(user).scope("lead").ids == {top.pk, low.pk}
        with pytest.raises(Conflict) as caught:
            role_grant(acting_user=actor(boss), user=user, role="lead", department=top)
        assert caught.value.code == "role_held"
    with set_clock(T0 + timedelta(days=2)):
        assert policy_of(user).roles == frozenset()
        with pytest.raises(Conflict) as over:
            role_withdraw(acting_user=actor(boss), binding=bound)
        assert over.value.code == "role_ended"
        role_grant(acting_user=actor(boss), user=user, role="lead", department=top)
        assert policy_of(user).roles == {"lead"}


def test_a_role_that_has_not_begun_is_taken_back() -> None:
    boss, user = admin(), person("x")
    with set_clock(T0):
        bound = role_grant(
            acting_user=actor(boss), user=user, role="finance", valid_from=T0 + timedelta(days=9)
        )
        role_withdraw(acting_user=actor(boss), binding=bound)
    for days in (0, 5, 10, 400):
        with set_clock(T0 + timedelta(days=days)):
            assert policy_of(user).roles == frozenset()


@pytest.mark.parametrize("end", [T0, T0 - timedelta(seconds=1)])
def test_a_role_never_ends_before_it_starts(end: datetime) -> None:
    boss, user = admin(), person("x")
    before = counts()
    with set_clock(T0), pytest.raises(Invalid) as caught:
        role_grant(acting_user=actor(boss), user=user, role="finance", valid_to=end)
    assert caught.value.errors[0]["pointer"] == "valid_to"
    assert counts() == before


def test_password_change_ends_other_sessions_and_the_duty_to_change() -> None:
    boss, user = admin(), person("lin.yue")
    fresh, value = password_reset(acting_user=actor(boss), user=user)
    assert fresh.check_password(value)
    assert fresh.must_change_password
    browser = client_of(fresh)
    assert browser.get("/help/").status_code == 302, "nothing but the change of password"
    for old, new, pointer in [("wrong", "a new passphrase 1", "old_password"), (value, value, "password")]:
        with pytest.raises(Invalid) as caught:
            password_change(acting_user=actor(fresh), user=fresh, old_password=old, new_password=new)
        assert caught.value.errors[0]["pointer"] == pointer
    done = password_change(
        acting_user=actor(fresh), user=fresh, old_password=value, new_password="a new passphrase 1"
    )
    assert done.check_password("a new passphrase 1")
    assert not done.must_change_password
    assert not browser.get("/help/").context["user"].is_authenticated
    assert "passphrase" not in str(list(AuditEvent.objects.values()))


def test_a_token_changes_no_password() -> None:
    user = person("x")
    with pytest.raises(DomainError):
        password_change(
            acting_user=actor(user, via="token"),
            user=user,
            old_password=PASSWORD,
            new_password="something else 1",
        )


def test_first_admin_is_made_once() -> None:
    made = first_admin_create()
    assert (made.username, made.created) == ("admin", True)
    user = User.objects.get()
    assert user.check_password(made.password)
    assert policy_of(user).administers_people
    assert user.must_change_password
    again = first_admin_create(username="other")
    assert (again.username, again.password, again.created) == ("admin", "", False)
    assert User.objects.count() == 1
