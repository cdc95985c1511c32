"""The API of people: tokens, scopes, filters, paging, problem+json, Idempotency-Key, If-Match."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from portal.accounts.models import ApiToken, Department, RoleBinding, User
from portal.accounts.services import token_create, token_revoke, user_suspend
from portal.kernel.clock import now, set_clock
from portal.notify.services import notify
from portal.ops.models import AuditEvent, IdempotencyRecord, Incident
from portal.ops.services import incident_open
from tests.portal.builders import actor, admin, bearer, binding, client_of, department, person, token_of

pytestmark = pytest.mark.django_db
V1 = "/api/v1"
PROBLEM = "application/problem+json"


def send(client: Client, method: str, url: str, body: Any = None, **headers: Any) -> Any:
    return getattr(client, method)(f"{V1}{url}", data=body or {}, content_type="application/json", **headers)


def test_a_token_reads_and_is_401_once_revoked_expired_or_its_owner_suspended() -> None:
    boss, user = admin(), person("x")
    token, value = token_create(
        acting_user=actor(user), user=user, name="t", scopes=["read"], expires_at=now() + timedelta(days=2)
    )
    client = Client()
    me = client.get(f"{V1}/me/", **bearer(value))
    assert (me.status_code, me.json()["username"], me.json()["token_scopes"]) == (200, "x", ["read"])
    token.refresh_from_db()
    assert token.last_used_at is not None
    with set_clock(now() + timedelta(days=3)):
        assert client.get(f"{V1}/me/", **bearer(value)).status_code == 401
    token_revoke(acting_user=actor(user), token=token)
    answer = client.get(f"{V1}/me/", **bearer(value))
    assert (answer.status_code, answer["Content-Type"], answer.json()["code"]) == (
        401,
        PROBLEM,
        "token_invalid",
    )
    assert answer["WWW-Authenticate"].startswith("Bearer")
    other = token_of(user, "read")
    user_suspend(acting_user=actor(boss), user=user, reason="left")
    assert client.get(f"{V1}/me/", **bearer(other)).status_code == 401
    assert client.get(f"{V1}/me/", **bearer("gpp_madeup")).status_code == 401
    assert client.get(f"{V1}/me/").status_code in (401, 403)


def test_scopes_narrow_and_never_widen() -> None:
    boss, user = admin(), person("x")
    client = Client()
    new = {"username": "y", "display_name": "Y"}
    for value in (token_of(boss, "read"), token_of(boss, "read", "request", "approve")):
        answer = send(client, "post", "/users/", new, **bearer(value))
        assert (answer.status_code, answer["Content-Type"]) == (403, PROBLEM)
    assert send(client, "post", "/users/", new, **bearer(token_of(user, "admin"))).status_code == 403
    assert not User.objects.filter(username="y").exists()
    assert send(client, "post", "/users/", new, **bearer(token_of(boss, "admin"))).status_code == 201


def test_users_are_made_changed_suspended() -> None:
    client, home = client_of(admin()), department("vision")
    made = send(
        client,
        "post",
        "/users/",
        {"username": "lin.yue", "display_name": "林月", "home_department": str(home.uid)},
    )
    assert made.status_code == 201
    body = made.json()
    assert body["home_department"] == str(home.uid)
    assert User.objects.get(username="lin.yue").check_password(body["temporary_password"])
    uid, tag = body["uid"], made["ETag"]
    assert (tag, made["Cache-Control"]) == ('"1"', "no-store")
    changed = send(client, "patch", f"/users/{uid}/", {"email": "lin@x.lan"}, HTTP_IF_MATCH=tag)
    assert (changed.status_code, changed["ETag"], changed.json()["email"]) == (200, '"2"', "lin@x.lan")
    stale = send(client, "patch", f"/users/{uid}/", {"email": "other@x.lan"}, HTTP_IF_MATCH=tag)
    assert (stale.status_code, stale.json()["code"], stale.json()["current_version"]) == (
        412,
        "version_changed",
        2,
    )
    for wrong, pointer in (
        ({"email": "nope"}, "email"),
        ({"language": "fr"}, "language"),
        ({"home_department": "00000000-0000-7000-8000-000000000000"}, "home_department"),
        ({"system_account": "root"}, "system_account"),
    ):
        answer = send(client, "patch", f"/users/{uid}/", wrong)
        assert (answer.status_code, answer["Content-Type"]) == (400, PROBLEM)
        assert answer.json()["errors"][0]["pointer"] == pointer
        assert answer.json()["request_id"]
    assert User.objects.get(uid=uid).version == 2
    assert send(client, "post", f"/users/{uid}/suspend/", {}).status_code == 400
    gone = send(client, "post", f"/users/{uid}/suspend/", {"reason": "left", "leases": "keep"})
    assert (gone.status_code, gone.json()["is_active"]) == (200, False)
    assert (
        send(client, "post", f"/users/{uid}/suspend/", {"reason": "left"}).json()["code"] == "user_suspended"
    )
    assert send(client, "post", f"/users/{uid}/reactivate/").json()["is_active"] is True


def test_times_are_utc() -> None:
    user = person("x", time_zone="Asia/Shanghai")
    row = client_of(user).get(f"{V1}/me/").json()
    assert row["date_joined"].endswith("Z")


def test_lists_page_filter_and_refuse_unknown_filters() -> None:
    boss, home = admin(), department("vision")
    for n in range(7):
        person(f"p{n}", ("researcher", home))
    client = client_of(boss)
    page = client.get(f"{V1}/users/?page_size=3&page=3&role=researcher").json()
    assert (page["count"], [r["username"] for r in page["results"]]) == (7, ["p6"])
    assert client.get(f"{V1}/users/?page_size=100000").json()["count"] == 8
    assert client.get(f"{V1}/users/?page=99").status_code == 404
    unknown = client.get(f"{V1}/users/?rolle=lead")
    assert (unknown.status_code, unknown.json()["code"]) == (400, "unknown_filter")
    assert unknown.json()["errors"][0]["pointer"] == "rolle"
    for url in (
        "/users/?role=king",
        "/users/?active=perhaps",
        "/users/?department=nowhere",
        "/users/?ordering=password",
        "/role-bindings/?user=7",
        "/audit/?since=yesterday",
        "/incidents/?state=x",
        "/tokens/?state=x",
        "/departments/?parent=x",
    ):
        assert client.get(f"{V1}{url}").status_code == 400, url


def test_a_key_makes_a_write_happen_once_and_secrets_are_not_kept() -> None:
    client = client_of(admin())
    body = {"username": "lin.yue", "display_name": "Lin"}
    first = send(client, "post", "/users/", body, HTTP_IDEMPOTENCY_KEY="k1")
    again = send(client, "post", "/users/", body, HTTP_IDEMPOTENCY_KEY="k1")
    assert (first.status_code, again.status_code, again["Idempotent-Replay"]) == (201, 201, "true")
    assert again.json()["uid"] == first.json()["uid"]
    assert again.json()["temporary_password"] is None
    assert first.json()["temporary_password"] not in str(list(IdempotencyRecord.objects.values()))
    assert User.objects.filter(username="lin.yue").count() == 1
    other = send(client, "post", "/users/", {**body, "display_name": "X"}, HTTP_IDEMPOTENCY_KEY="k1")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    refused = send(
        client, "post", "/users/", {"username": "lin.yue", "display_name": "L"}, HTTP_IDEMPOTENCY_KEY="k2"
    )
    assert (refused.status_code, refused.json()["code"]) == (409, "username_taken")
    assert not IdempotencyRecord.objects.filter(key="k2").exists(), "nothing was done: the key stays free"
    assert send(client, "post", "/users/", body, HTTP_IDEMPOTENCY_KEY="k" * 129).status_code == 400


def test_a_file_sent_again_counts_by_what_is_in_it() -> None:
    client = client_of(admin())

    def sent(code: str) -> Any:
        file = SimpleUploadedFile("departments.csv", f"code,name\n{code},{code}\n".encode())
        return client.post(
            f"{V1}/imports/departments/", {"file": file, "dry_run": "false"}, HTTP_IDEMPOTENCY_KEY="f1"
        )

    first, again, other = sent("aa"), sent("aa"), sent("bb")
    assert first.status_code == again.status_code < 300 and again["Idempotent-Replay"] == "true"
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    assert list(Department.objects.values_list("code", flat=True)) == ["aa"]


def test_an_unknown_address_is_a_problem_with_a_code() -> None:
    answer = client_of(admin()).get(f"{V1}/no-such-thing/")
    body = answer.json()
    assert (answer.status_code, answer["Content-Type"], body["code"]) == (404, PROBLEM, "not_found")
    assert body["type"] == "urn:gpupool:error:not_found" and body["errors"] == [] and body["request_id"]


def test_departments_by_api() -> None:
    client = client_of(admin())
    a = send(client, "post", "/departments/", {"code": "a", "name": "A"}).json()
    b = send(client, "post", "/departments/", {"code": "b", "name": "B", "parent": a["uid"]}).json()
    assert (b["path"], b["parent"]) == ("A / B", a["uid"])
    cycle = send(client, "post", f"/departments/{a['uid']}/move/", {"parent": b["uid"]})
    assert (cycle.status_code, cycle.json()["code"]) == (409, "cycle")
    renamed = send(client, "patch", f"/departments/{a['uid']}/", {"name": "Alpha"}, HTTP_IF_MATCH='"1"')
    assert renamed.json()["path"] == "Alpha"
    assert (
        send(client, "patch", f"/departments/{a['uid']}/", {"name": "X"}, HTTP_IF_MATCH='"1"').status_code
        == 412
    )
    blocked = send(client, "post", f"/departments/{a['uid']}/close/", {"reason": "merged"})
    assert (blocked.status_code, blocked.json()["in_the_way"][0]["count"]) == (409, 1)
    moved = send(client, "post", f"/departments/{b['uid']}/move/", {"parent": None})
    assert (moved.status_code, moved.json()["path"]) == (200, "B")
    closed = send(client, "post", f"/departments/{b['uid']}/close/", {"reason": "merged"})
    assert closed.json()["closed_at"].endswith("Z")
    assert [r["code"] for r in client.get(f"{V1}/departments/?open=true").json()["results"]] == ["a"]
    assert send(client, "post", f"/departments/{b['uid']}/reopen/").json()["closed_at"] is None
    assert Department.objects.count() == 2


def test_role_bindings_by_api() -> None:
    boss, home, user = admin(), department("vision"), person("x")
    client = client_of(boss)
    body = {"user": str(user.uid), "role": "lead", "department": str(home.uid)}
    made = send(client, "post", "/role-bindings/", body)
    assert (made.status_code, made.json()["role"], made.json()["valid_to"]) == (201, "lead", None)
    assert send(client, "post", "/role-bindings/", body).json()["code"] == "role_held"
    own = send(client, "post", "/role-bindings/", {"user": str(boss.uid), "role": "finance"})
    assert (own.status_code, own.json()["code"]) == (403, "self_grant")
    last = send(client, "post", f"/role-bindings/{binding(boss).uid}/end/")
    assert (last.status_code, last.json()["code"]) == (409, "last_administrator")
    ended = send(client, "post", f"/role-bindings/{made.json()['uid']}/end/", {"reason": "done"})
    assert ended.json()["valid_to"] is not None
    assert RoleBinding.objects.count() == 2
    assert client.get(f"{V1}/role-bindings/?role=lead&state=ended").json()["count"] == 1


def test_P077_a_person_rotates_and_revokes_own_tokens() -> None:
    user = person("x")
    browser = client_of(user)
    made = send(browser, "post", "/tokens/", {"name": "ci", "scopes": ["read"]})
    value, uid = made.json()["value"], made.json()["uid"]
    assert (made.status_code, made["Cache-Control"]) == (201, "no-store")
    client = Client()
    assert (
        send(client, "post", "/tokens/", {"name": "x", "scopes": ["read"]}, **bearer(value)).status_code
        == 403
    )
    turned = send(client, "post", f"/tokens/{uid}/rotate/", **bearer(value))
    assert turned.status_code == 200, "a token rotates itself"
    assert client.get(f"{V1}/me/", **bearer(value)).status_code == 401, "the old one is over at once"
    fresh = turned.json()["value"]
    row = client.get(f"{V1}/tokens/", **bearer(fresh)).json()["results"][0]
    assert "value" not in row
    assert row["last_used_at"] is not None
    assert row["expires_at"] is not None
    assert send(client, "post", f"/tokens/{row['uid']}/revoke/", **bearer(fresh)).status_code == 200
    assert client.get(f"{V1}/me/", **bearer(fresh)).status_code == 401
    assert ApiToken.objects.filter(revoked_at=None).count() == 0


def test_notices_by_api() -> None:
    user = person("x")
    notify(user_ids=[user.pk], kind="one", params={"at": datetime(2026, 1, 1, tzinfo=UTC)}, url="/leases/7/")
    notify(user_ids=[user.pk], kind="two", urgent=True)
    client = client_of(user)
    rows = client.get(f"{V1}/notifications/?unread=true").json()["results"]
    assert [r["kind"] for r in rows] == ["two", "one"]
    assert rows[1]["url"].endswith("/leases/7/")
    assert client.get(f"{V1}/notifications/?urgent=true").json()["count"] == 1
    assert send(client, "post", f"/notifications/{rows[0]['uid']}/read/").json()["read_at"] is not None
    assert send(client, "post", "/notifications/read-all/").json() == {"read": 1}


def test_audit_by_cursor_for_auditors() -> None:
    auditor = person("he", ("auditor", None))
    for n in range(5):
        person(f"p{n}")
    client = client_of(auditor)
    first = client.get(f"{V1}/audit/?page_size=3&action=user").json()
    assert [r["object_label"] for r in first["results"]] == ["P4", "P3", "P2"]
    second = client.get(first["next"]).json()
    assert [r["object_label"] for r in second["results"]] == ["P1", "P0", "He"]
    one = User.objects.get(username="p3")
    assert [r["action"] for r in client.get(f"{V1}/audit/?object={one.uid}").json()["results"]] == [
        "user.created"
    ]
    assert client.get(f"{V1}/audit/?until=2000-01-01T00:00:00Z").json()["results"] == []
    assert client_of(person("x")).get(f"{V1}/audit/").status_code == 403
    assert client.post(f"{V1}/audit/").status_code == 405
    assert AuditEvent.objects.filter(action="user.created").count() == 7


def test_incidents_by_api() -> None:
    boss, auditor = admin(), person("he", ("auditor", None))
    incident = incident_open(kind="node_lost", dedupe_key="n", facts={"node": "a"})
    client = client_of(boss)
    row = client.get(f"{V1}/incidents/").json()["results"][0]
    assert (row["ref"], row["state"]) == (f"I-{incident.pk}", "open")
    url = f"/incidents/{incident.uid}"
    assert send(client_of(auditor), "post", f"{url}/close/", {"note": "x"}).status_code == 403
    assert send(client, "post", f"{url}/acknowledge/").json()["state"] == "acknowledged"
    assert send(client, "post", f"{url}/note/", {"note": "cable"}).status_code == 200
    assert send(client, "post", f"{url}/close/", {"note": ""}).status_code == 400
    assert send(client, "post", f"{url}/close/", {"note": "replaced"}).json()["state"] == "closed"
    assert send(client, "post", f"{url}/close/", {"note": "again"}).json()["code"] == "incident_closed"
    kinds = [e["kind"] for e in client.get(f"{V1}{url}/entries/").json()]
    assert kinds == ["closed", "note", "acknowledged"]
    assert Incident.objects.get().note == "replaced"


def test_bad_bodies_are_400_not_500() -> None:
    client = client_of(admin())
    for body in ("{", "[]", '"text"', "null", '{"username": 7, "display_name": ["x"]}', '{"username": null}'):
        answer = client.post(f"{V1}/users/", data=body, content_type="application/json")
        assert (answer.status_code, answer["Content-Type"]) == (400, PROBLEM), body
    assert client.post(f"{V1}/users/", data="x", content_type="text/csv").status_code == 415
    assert client.get(f"{V1}/users/not-a-uid/").status_code == 404


def test_a_session_needs_the_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin(), backend="django.contrib.auth.backends.ModelBackend")
    assert send(client, "post", "/users/", {"username": "y", "display_name": "Y"}).status_code == 403
    assert not User.objects.filter(username="y").exists()


def test_a_rate_limit_answers_429_with_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from rest_framework.throttling import UserRateThrottle

    cache.clear()
    monkeypatch.setattr(UserRateThrottle, "rate", "3/min", raising=False)
    client = client_of(person("x"))
    answers = [client.get(f"{V1}/me/") for _n in range(5)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429, 429]
    assert int(answers[-1]["Retry-After"]) > 0
    assert answers[-1].json()["code"] == "throttled"
    cache.clear()


def test_the_schema_is_there_and_its_page_loads_nothing_from_elsewhere(client: Client) -> None:
    schema = client.get("/api/schema/?format=json")
    assert schema.status_code == 200
    paths = schema.json()["paths"]
    assert "/api/v1/users/{uid}/suspend/" in paths
    page = client.get("/api/docs/")
    body = page.content.decode()
    assert 'src="http' not in body
    assert "<style" not in body
    assert "unsafe-inline" not in page["Content-Security-Policy"].replace(
        "style-src-attr 'unsafe-inline'", ""
    )


def test_imports_by_api_are_dry_by_default() -> None:
    client = client_of(admin())
    department("vision")

    def upload(text: str, **more: str) -> Any:
        file = SimpleUploadedFile("people.csv", text.encode(), content_type="text/csv")
        return client.post(f"{V1}/imports/people/", {"file": file, **more})

    good = "username,name,department,roles\nlin.yue,林月,vision,researcher\n"
    dry = upload(good)
    assert (dry.status_code, dry.json()["dry_run"], dry.json()["created"]) == (200, True, 1)
    assert not User.objects.filter(username="lin.yue").exists()
    bad = upload("username,name,department\nlin.yue,林月,nowhere\n", dry_run="false")
    assert (bad.status_code, bad.json()["code"]) == (400, "table_invalid")
    assert bad.json()["errors"][0]["pointer"] == "2/department"
    done = upload(good, dry_run="false").json()
    assert User.objects.get(username="lin.yue").check_password(done["first_passwords"][0]["password"])
    assert client.post(f"{V1}/imports/things/", {}).status_code == 404
    assert client_of(person("x")).post(f"{V1}/imports/people/", {}).status_code == 403


def test_webhooks_and_preferences_by_api() -> None:
    client, user = client_of(admin()), person("x")
    made = send(client, "post", "/webhooks/", {"name": "hub", "url": "https://hub/x"})
    assert made.status_code == 201
    uid = made.json()["uid"]
    assert len(made.json()["secret"]) == 43
    assert "secret" not in client.get(f"{V1}/webhooks/{uid}/").json()
    changed = send(client, "patch", f"/webhooks/{uid}/", {"active": False}, HTTP_IF_MATCH=made["ETag"])
    assert (changed.json()["active"], changed.json()["url"]) == (False, "https://hub/x")
    assert send(client, "post", "/webhooks/", {"name": "x", "url": "ftp://x"}).status_code == 400
    assert (
        send(client, "post", "/webhooks/", {"name": "x", "url": "https://x", "kinds": ["no"]}).status_code
        == 400
    )
    own = client_of(user)
    assert own.get(f"{V1}/webhooks/").status_code == 403
    rows = {r["kind"]: r for r in own.get(f"{V1}/notification-preferences/").json()}
    assert rows["ops.incident_opened"]["urgent"] is True
    off = send(own, "put", "/notification-preferences/", {"mail_off": ["accounts.role_granted"]})
    assert {r["kind"] for r in off.json() if not r["mail"]} == {"accounts.role_granted"}
    muted = send(own, "put", "/notification-preferences/", {"mail_off": ["ops.incident_opened"]})
    assert (muted.status_code, muted.json()["code"]) == (400, "cannot_be_muted")
