"""Home by role, error pages, health: what answers before any room does."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.contrib.messages.storage.cookie import CookieStorage
from django.db import OperationalError
from django.http import HttpRequest
from django.test import Client, RequestFactory, override_settings
from django.urls import set_script_prefix
from django.utils import translation
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import RoleBinding, User
from portal.accounts.policy import policy_of
from portal.kernel.errors import Blocked, Invalid, NotFound, Refused
from portal.web import health, views
from portal.web.middleware import DomainErrorMiddleware
from portal.web.nav import navigation

HTMX = {"HX-Request": "true"}


def request_for(path: str = "/x/", user: Any = None, **headers: str) -> HttpRequest:
    """A request as it stands behind the middleware."""
    request = RequestFactory().get(path, headers=headers)
    request.user = user or AnonymousUser()
    request.request_id = "req-12345678"  # type: ignore[attr-defined]
    request._messages = CookieStorage(request)  # type: ignore[attr-defined]
    return request


def person(role: str | None) -> User:
    user = User.objects.create(username=f"u-{role or 'none'}", display_name="Lin Yue", language="en")
    if role:
        RoleBinding.objects.create(user=user, role=role)
    return user


@pytest.fixture(autouse=True)
def _english() -> Any:
    with translation.override("en"):
        yield


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("role", "home"),
    [("pool_admin", "/operations/"), ("finance", "/finance/"), ("auditor", "/months/")],
)
def test_home_follows_the_role(client: Client, role: str, home: str) -> None:
    client.force_login(person(role), backend="django.contrib.auth.backends.ModelBackend")
    response = client.get("/")
    assert response.status_code == 302
    assert response["Location"] == home


@pytest.mark.django_db
def test_home_of_someone_without_a_role_says_what_to_do(client: Client) -> None:
    client.force_login(person(None), backend="django.contrib.auth.backends.ModelBackend")
    response = client.get("/", headers={"Accept-Language": "en"})
    assert response.status_code == 200
    assert "You have no role yet" in response.content.decode()


@pytest.mark.django_db
def test_home_asks_a_stranger_to_sign_in(client: Client) -> None:
    response = client.get("/")
    assert response.status_code == 302
    assert response["Location"].startswith("/accounts/login/?next=/")


@pytest.mark.django_db
def test_a_session_that_ended_under_an_open_page(client: Client) -> None:
    step = "/approvals/018f0000-0000-7000-8000-000000000000/decide/"
    part = client.get("/leases/mine/cards/", headers=HTMX)
    assert (part.status_code, part.content) == (401, b"")
    came = {"Referer": "http://testserver/approvals/?tab=mine"}
    for headers, leads in (
        (came, "/approvals/%3Ftab%3Dmine"),
        ({"Referer": "https://x.example/"}, "/"),
        ({}, "/"),
    ):
        answer = client.post(step, {"decision": "approve"}, headers=headers)
        assert (answer.status_code, answer["Location"]) == (302, f"/accounts/login/?next={leads}")
    page = client.get(answer["Location"], headers={"Accept-Language": "en"}).content.decode()
    assert "You were signed out: nothing was done." in page


@pytest.mark.django_db
def test_signing_out_oneself_is_no_surprise(client: Client) -> None:
    client.force_login(person("auditor"), backend="django.contrib.auth.backends.ModelBackend")
    page = client.post("/accounts/logout/", follow=True).content.decode()
    assert "nothing was done" not in page


@pytest.mark.django_db
def test_an_address_that_only_takes_forms_has_a_page_for_browsers(client: Client) -> None:
    client.force_login(person("auditor"), backend="django.contrib.auth.backends.ModelBackend")
    response = client.get("/approvals/018f0000-0000-7000-8000-000000000000/decide/")
    assert (response.status_code, response["Allow"]) == (405, "POST")
    assert "it only takes what a form sends" in response.content.decode()


@pytest.mark.parametrize(
    ("view", "status"),
    [(views.bad_request, 400), (views.forbidden, 403), (views.not_found, 404), (views.csrf_failure, 403)],
)
def test_error_pages_name_the_request(view: Any, status: int) -> None:
    response = view(request_for())
    assert response.status_code == status
    assert "req-12345678" in response.content.decode()


@pytest.mark.parametrize("status", [400, 403, 404, 409, 500])
def test_a_fragment_that_fails_is_short_and_has_no_page_around_it(status: int) -> None:
    response = views.error_page(request_for(**HTMX), status, detail="Why")
    assert response.status_code == status
    assert b"<html" not in response.content


def test_a_program_gets_problem_json() -> None:
    response = views.error_page(request_for("/api/v1/none/"), 404)
    assert response["Content-Type"] == "application/problem+json"
    assert b'"request_id": "req-12345678"' in response.content


def middleware_answer(error: Exception, **headers: str) -> Any:
    return DomainErrorMiddleware(lambda r: views.healthz(r)).process_exception(request_for(**headers), error)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (Invalid.field("count", _("At least 1.")), 400, "At least 1."),
        (Refused(code="not_lead", detail=_("Only the lead decides.")), 403, "Only the lead decides."),
        (NotFound(code="no_request", detail=_("No such request.")), 404, "No such request."),
        (
            Blocked(
                code="over",
                detail=_("Over the limit."),
                blocking={"level": "Vision", "limit": 32000, "used": 22000, "requested": 16000},
            ),
            409,
            "<b>22</b>",
        ),
    ],
)
def test_a_domain_error_becomes_its_page(error: Exception, status: int, words: str) -> None:
    response = middleware_answer(error)
    assert response.status_code == status
    assert words in response.content.decode()


def test_a_lost_database_becomes_a_page_that_looks_again() -> None:
    response = middleware_answer(OperationalError("server closed the connection"))
    assert response.status_code == 503
    assert response["Retry-After"] == "15"
    assert "data-wait-ready" in response.content.decode()
    assert "server closed" not in response.content.decode()


def test_other_errors_are_left_to_the_log() -> None:
    assert middleware_answer(ValueError("secret")) is None


def test_the_500_page_stands_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the shell itself is broken")

    monkeypatch.setattr(views, "error_page", broken)
    response = views.server_error(request_for())
    assert response.status_code == 500
    assert "req-12345678" in response.content.decode()


def test_healthz_asks_nobody(client: Client) -> None:
    assert client.get("/healthz").json()["status"] == "ok"


@pytest.mark.django_db
def test_readyz_names_what_is_away(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/readyz").status_code == 200
    monkeypatch.setattr(health, "broker", lambda: {"name": "redis", "ok": False, "detail": "ConnectionError"})
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"][-1] == {"name": "redis", "ok": False, "detail": "ConnectionError"}


@pytest.mark.django_db
def test_design_page_is_not_for_everybody_in_production(client: Client) -> None:
    with override_settings(GPUPOOL_ENV="production", GPUPOOL_DEMO=False):
        assert client.get("/design/").status_code == 404


@pytest.mark.django_db
@pytest.mark.parametrize("prefix", ["/", "/gpu/"])
def test_the_current_entry_is_marked_also_under_a_path_prefix(prefix: str) -> None:
    request = request_for("/nodes/import/", user=person("pool_admin"))
    request.policy = policy_of(request.user)  # type: ignore[attr-defined]
    set_script_prefix(prefix)
    try:
        groups = navigation(request)["shell"]["groups"]
    finally:
        set_script_prefix("/")
    current = [entry["url"] for group in groups for entry in group["entries"] if entry["current"]]
    assert current == [f"{prefix}nodes/"]
