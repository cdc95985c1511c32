"""Text that no field can hold ends in a clear 400, on pages and in the API, signed in or not."""

from __future__ import annotations

import json

import pytest
from django.test import Client

from tests.portal.builders import bearer, person, token_of

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("path", ["/accounts/login/", "/nodes/", "/requests/", "/api/v1/nodes/"])
def test_nul_in_an_address_is_refused(path: str) -> None:
    assert Client().get(f"{path}?q=%00").status_code == 400


def test_nul_in_a_form_is_refused_before_anybody_looks_it_up() -> None:
    response = Client().post("/accounts/login/", {"username": "a\x00b", "password": "x"})
    assert response.status_code == 400
    response = Client().post(
        "/accounts/login/", "username=a%00b&password=x", content_type="application/x-www-form-urlencoded"
    )
    assert response.status_code == 400


@pytest.mark.parametrize(
    "body", ['{"name": "a\\u0000b"}', '{"name": "\\ud800"}', '{"a\\u0000": 1}', "[" * 50_000]
)
def test_odd_json_is_refused_with_a_code(body: str) -> None:
    user = person()
    answer = Client().generic(
        "PATCH",
        "/api/v1/me/",
        body.encode(),
        content_type="application/json",
        **bearer(token_of(user, "read", "admin")),
    )
    assert answer.status_code == 400
    assert answer.json()["code"] in ("text_invalid", "parse_error")


def test_a_backslash_in_front_of_u0000_is_only_text() -> None:
    user = person()
    answer = Client().generic(
        "PATCH",
        "/api/v1/me/",
        json.dumps({"language": "en", "note": "\\u0000 and 中文 \U0001f600"}).encode(),
        content_type="application/json",
        **bearer(token_of(user, "read", "admin")),
    )
    assert answer.status_code != 500
    assert answer.json().get("code") != "text_invalid"
