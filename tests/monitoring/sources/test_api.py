"""Sources by the API: administrators alone, strict, and never a secret in an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from monitoring.models import MetricSource
from pool.models import ClusterCredential
from tests.monitoring import builders as b
from tests.monitoring.sources.server import serving
from tests.portal.builders import bearer, token_of

pytestmark = pytest.mark.django_db
PATH = "/api/v1/telemetry/sources/"
GOOD = {
    "name": "dcgm", "cluster": "shanghai-agents", "kind": "exporter", "url": "http://{node}:9400/metrics",
    "auth": "bearer", "secret": "s3cr3t-token",
}  # fmt: skip


def call(user: Any, method: str, path: str, body: Any = None, **headers: str) -> Any:
    extra = {**bearer(token_of(user, "read", "admin")), **headers}
    data = b"" if body is None else json.dumps(body)
    return Client().generic(method, path, data=data, content_type="application/json", **extra)


def test_added_changed_and_hastened_without_telling_the_secret() -> None:
    b.node(gpus=1)
    chief = b.person("chief", "pool_admin")
    made = call(chief, "POST", PATH, GOOD)
    assert made.status_code == 201, made.content
    uid = made.json()["uid"]
    assert "s3cr3t" not in made.content.decode() and made.json()["every_s"] == 15
    changed = call(chief, "PATCH", f"{PATH}{uid}/", {"every_s": 60}, HTTP_IF_MATCH=made["ETag"])
    assert (changed.status_code, changed.json()["every_s"], changed.json()["url"]) == (200, 60, GOOD["url"])
    stale = call(chief, "PATCH", f"{PATH}{uid}/", {"every_s": 30}, HTTP_IF_MATCH=made["ETag"])
    assert stale.status_code == 412 and MetricSource.objects.get().every_s == 60
    assert call(chief, "POST", f"{PATH}{uid}/fetch/", {}).status_code == 202
    listed = call(chief, "GET", PATH + "?cluster=shanghai-agents")
    assert [row["name"] for row in listed.json()["results"]] == ["dcgm"]
    assert "s3cr3t" not in listed.content.decode()
    assert call(chief, "PATCH", f"{PATH}{uid}/", {"auth": "none"}).status_code == 200
    assert not ClusterCredential.objects.exists(), "a source without sign-in keeps no secret"


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "nowhere"},
        {"kind": "snmp"},
        {"every_s": 1},
        {"surprise": 1},
        {"url": "file:///etc/passwd"},
    ],
)
def test_bad_input_is_400_and_writes_nothing(change: dict[str, Any]) -> None:
    b.node(gpus=1)
    chief = b.person("chief", "pool_admin")
    answer = call(chief, "POST", PATH, GOOD | change)
    assert answer.status_code == 400 and answer["Content-Type"].startswith("application/problem+json")
    assert not MetricSource.objects.exists() and not ClusterCredential.objects.exists()


def test_others_see_and_write_nothing() -> None:
    b.node(gpus=1)
    chief, other = b.person("chief", "pool_admin"), b.person("other", where=b.department())
    call(chief, "POST", PATH, GOOD)
    source = MetricSource.objects.get()
    for method, path, body in (
        ("GET", PATH, None),
        ("GET", f"{PATH}{source.uid}/", None),
        ("POST", PATH, GOOD | {"name": "mine"}),
        ("PATCH", f"{PATH}{source.uid}/", {"active": False}),
        ("POST", f"{PATH}{source.uid}/fetch/", {}),
        ("POST", f"{PATH}{source.uid}/check/", {}),
    ):
        assert call(other, method, path, body).status_code == 403, (method, path)
    assert MetricSource.objects.count() == 1 and MetricSource.objects.get().active


def test_a_dry_run_says_what_would_be_matched() -> None:
    [card] = b.node(gpus=1).gpus.all()
    chief = b.person("chief", "pool_admin")
    with serving() as exporter:
        exporter.bodies["/metrics"] = f'DCGM_FI_DEV_GPU_UTIL{{UUID="{card.uuid}",Hostname="h"}} 7\n'
        body = {
            "name": "one",
            "cluster": "shanghai-agents",
            "kind": "exporter",
            "url": exporter.url + "/metrics",
        }
        uid = call(chief, "POST", PATH, body | {"active": False}).json()["uid"]
        answer = call(chief, "POST", f"{PATH}{uid}/check/", {})
    assert (answer.status_code, answer.json()["code"], answer.json()["states"]) == (200, "ok", {"taken": 1})
    assert answer.json()["matches"] == [
        {
            "uuid": card.uuid, "state": "taken", "gpu": str(card.uid), "told_by": ["h"], "others": [], "model": "",
            "instances": 0, "measures": ["util"],
        }
    ]  # fmt: skip
