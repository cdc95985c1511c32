"""Pages of people: signing in, forms that keep what was typed, query counts."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from portal.accounts.models import ApiToken, Department, RoleBinding, User
from portal.accounts.policy import policy_of
from portal.accounts.services import password_reset
from portal.kernel.clock import now
from quotas.models import QuotaGrant
from quotas.services.grants import grant_set
from tests.portal.builders import PASSWORD, actor, admin, binding, client_of, department, person
from tests.quotas.build import flavour

pytestmark = pytest.mark.django_db


def test_signing_in_and_out() -> None:
    person("lin.yue")
    client = Client()
    wrong = client.post("/accounts/login/", {"username": "lin.yue", "password": "no"})
    assert wrong.status_code == 200
    assert "lin.yue" in wrong.content.decode(), "the name stays"
    right = client.post(
        "/accounts/login/", {"username": "lin.yue", "password": PASSWORD, "next": "/notices/"}
    )
    assert (right.status_code, right["Location"]) == (302, "/notices/")
    away = Client().post(
        "/accounts/login/", {"username": "lin.yue", "password": PASSWORD, "next": "https://evil.example/"}
    )
    assert away["Location"] == "/"
    assert client.get("/accounts/logout/").status_code == 405
    assert client.post("/accounts/logout/").status_code == 302
    assert client.get("/notices/").status_code == 302


def test_too_many_tries_are_paused_with_429() -> None:
    person("lin.yue")
    client = Client()
    statuses = [
        client.post("/accounts/login/", {"username": "lin.yue", "password": f"no{n}"}).status_code
        for n in range(9)
    ]
    assert statuses[:7] == [200] * 7
    assert statuses[-1] == 429
    locked = client.post("/accounts/login/", {"username": "lin.yue", "password": PASSWORD})
    assert locked.status_code == 429, "the right password does not help during the pause"
    assert int(locked["Retry-After"]) == 900


def test_a_suspended_person_cannot_sign_in() -> None:
    boss, user = admin(), person("x")
    client_of(boss).post(f"/people/{user.uid}/suspend/", {"suspend-reason": "left", "suspend-leases": "keep"})
    answer = Client().post("/accounts/login/", {"username": "x", "password": PASSWORD})
    assert answer.status_code == 200
    assert not answer.wsgi_request.user.is_authenticated


def test_a_first_password_opens_nothing_but_its_change() -> None:
    boss, user = admin(), person("x")
    fresh, value = password_reset(acting_user=actor(boss), user=user)
    client = client_of(fresh)
    assert client.get("/people/")["Location"] == "/accounts/password/"
    assert client.get("/api/v1/me/").status_code == 403
    kept = client.post("/accounts/password/", {"old_password": value, "password": "short", "repeat": "short"})
    assert kept.status_code == 400
    done = client.post(
        "/accounts/password/",
        {"old_password": value, "password": "a longer phrase 9", "repeat": "a longer phrase 9"},
    )
    assert done.status_code == 302
    assert client.get("/accounts/profile/").status_code == 200, "this session goes on"


def test_preferences_language_theme_are_kept() -> None:
    user = person("x", time_zone="Asia/Shanghai")
    client = client_of(user)
    assert client.post("/accounts/theme/", {"theme": "dark"}).status_code == 204
    assert client.post("/accounts/theme/", {"theme": "pink"}).status_code == 400
    client.post("/i18n/setlang/", {"language": "zh-hans", "next": "/accounts/profile/"})
    user.refresh_from_db()
    assert (user.theme, user.language) == ("dark", "zh-hans")
    form = {"language": "en", "time_zone": "America/New_York", "theme": "system"}
    answer = client.post("/accounts/profile/", form)
    assert answer.cookies["django_language"].value == "en"
    user.refresh_from_db()
    assert (user.language, user.time_zone, user.theme) == ("en", "America/New_York", "system")
    bad = client.post("/accounts/profile/", {**form, "time_zone": "Mars/Base"})
    assert bad.status_code == 400


def test_adding_a_person_shows_the_password_once() -> None:
    boss, home = admin(), department("vision")
    client = client_of(boss)
    form = {
        "username": "gao.fei",
        "display_name": "高飞",
        "email": "",
        "home_department": str(home.uid),
        "system_account": "",
        "language": "zh-hans",
    }
    bad = client.post("/people/new/", {**form, "username": "Gao Fei"})
    assert bad.status_code == 400
    assert "高飞" in bad.content.decode(), "what was typed stays"
    answer = client.post("/people/new/", form)
    user = User.objects.get(username="gao.fei")
    value = answer.context["password"]
    assert re.fullmatch(r"[a-z0-9]{4}(?:-[a-z0-9]{4}){3}", value)
    assert value in answer.content.decode()
    assert user.check_password(value)
    assert value not in client.get(f"/people/{user.uid}/").content.decode()


def test_roles_are_bound_and_ended_by_page() -> None:
    boss, home, user = admin(), department("vision"), person("x")
    client = client_of(boss)
    last = (now() + timedelta(days=3)).date()
    form = {
        "role-role": "lead",
        "role-department": str(home.uid),
        "role-valid_from": "",
        "role-valid_to": last,
    }
    assert client.post(f"/people/{user.uid}/roles/", form).status_code == 302
    bound = binding(user)
    assert (bound.role, bound.department_id) == ("lead", home.pk)
    twice = client.post(f"/people/{user.uid}/roles/", form)
    assert twice.status_code == 400
    assert RoleBinding.objects.filter(user=user).count() == 1
    assert client.post(f"/roles/{bound.uid}/end/", {"reason": "done"}).status_code == 302
    bound.refresh_from_db()
    assert bound.valid_to is not None
    assert bound.valid_to <= now()
    own = client.post(f"/people/{boss.uid}/roles/", {**form, "role-role": "finance"})
    assert own.status_code == 400, "not to himself"


def test_departments_are_changed_by_page() -> None:
    client = client_of(admin())
    a = department("a")
    b = department("b", a)
    assert (
        client.post(
            f"/departments/{a.uid}/edit/", {"edit-name": "Alpha", "edit-cost_center": "1"}
        ).status_code
        == 302
    )
    cycle = client.post(f"/departments/{a.uid}/move/", {"move-parent": str(b.uid)})
    assert cycle.status_code == 400
    assert client.post(f"/departments/{b.uid}/move/", {"move-parent": ""}).status_code == 302
    assert client.post(f"/departments/{b.uid}/close/", {"close-reason": ""}).status_code == 400
    assert client.post(f"/departments/{b.uid}/close/", {"close-reason": "merged"}).status_code == 302
    rows = Department.objects.without_tree_fields()
    assert sorted(rows.values_list("name", "parent_id")) == [("Alpha", None), ("B", None)]
    assert not rows.get(code="b").is_open
    assert client.post(f"/departments/{b.uid}/reopen/").status_code == 302


def test_closing_and_opening_again_say_that_the_quota_does_not_come_back() -> None:
    boss = admin()
    client, a, kind = client_of(boss), department("a"), flavour("h800")
    for n in (4, 5):  # changed once: what counts are quotas, not their versions
        grant_set(
            acting_user=actor(boss), policy=policy_of(boss), department=a, flavour=kind, guaranteed=n * 1000
        )
    page = f"/departments/{a.uid}/"
    assert b"does not bring" in client.get(page).content, "the dialog that asks says it"
    closed = client.post(f"{page}close/", {"close-reason": "merged"}, follow=True).content.decode()
    assert "Quotas that ended when it was closed: <strong>1</strong>" in closed
    opened = client.post(f"{page}reopen/", follow=True).content.decode()
    assert "Open again, without quota" in opened
    assert "Quotas that ended" not in opened
    assert not QuotaGrant.objects.filter(during__contains=now()).exists()
    b = department("b")
    client.post(f"/departments/{b.uid}/close/", {"close-reason": "merged"})
    again = client.post(f"/departments/{b.uid}/reopen/", follow=True).content.decode()
    assert "Open again." in again, "it had none"


def test_own_tokens_by_page() -> None:
    user = person("x")
    client = client_of(user)
    answer = client.post("/accounts/tokens/", {"name": "laptop", "scopes": ["read"], "days": "30"})
    assert answer["Cache-Control"] == "no-store"
    value = answer.context["value"]
    assert value.startswith("gpp_")
    assert value in answer.content.decode()
    assert value not in client.get("/accounts/tokens/").content.decode()
    token = ApiToken.objects.get()
    assert client.post("/accounts/tokens/", {"name": "", "scopes": [], "days": "0"}).status_code == 400
    assert client.post(f"/accounts/tokens/{token.uid}/rotate/").context["value"] != value
    fresh = ApiToken.objects.get(revoked_at=None)
    assert client.post(f"/accounts/tokens/{fresh.uid}/revoke/").status_code == 302
    assert not ApiToken.objects.filter(revoked_at=None).exists()


def test_get_changes_nothing() -> None:
    boss, user = admin(), person("x", ("researcher", department("d")))
    client = client_of(boss)
    for act in ("edit", "roles", "suspend", "reactivate"):
        assert client.get(f"/people/{user.uid}/{act}/").status_code == 302
    assert client.get(f"/people/{user.uid}/password/").status_code == 405
    assert client.get(f"/roles/{binding(user).uid}/end/").status_code == 405
    user.refresh_from_db()
    assert (user.is_active, user.version) == (True, 1)


@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_pages_stay_within_fifteen_queries(language: str, django_assert_max_num_queries: Any) -> None:
    boss = admin()
    top = department("top")
    for n in range(12):
        row = department(f"d{n}", top)
        for m in range(3):
            person(f"p{n}.{m}", ("researcher", row), ("lead", row), home_department=row)
    someone = User.objects.get(username="p3.1")
    client = client_of(boss)
    client.cookies["django_language"] = language
    for url in (
        "/people/",
        f"/people/{someone.uid}/",
        "/departments/",
        f"/departments/{top.uid}/",
        "/roles/",
        "/tokens/",
        "/accounts/tokens/",
        "/accounts/profile/",
        "/notices/",
        "/notices/preferences/",
        "/notices/webhooks/",
        "/audit/",
        "/incidents/",
    ):
        with django_assert_max_num_queries(15):
            answer = client.get(url)
        assert answer.status_code == 200, url
        assert len(answer.content) < 60_000, (url, len(answer.content))


def test_counts_of_the_tabs_are_those_of_the_lists() -> None:
    boss, home = admin(), department("vision")
    for n in range(3):
        person(f"p{n}", ("researcher", home))
    client = client_of(boss)
    tabs = client.get("/people/").context["tabs"]
    assert [t["count"] for t in tabs] == ["4", "1", "4", "0"]
    lead_tabs = client_of(person("lead", ("lead", home))).get("/people/").context["tabs"]
    assert [t["count"] for t in lead_tabs] == ["4", "1", "4"]
