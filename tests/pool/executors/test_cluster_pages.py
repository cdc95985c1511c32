"""Pages and API of clusters: set up, checked, nodes taken in after a dry run, limits after a difference."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from pool.executors.base import Found, Limit
from pool.models import Allocation, Cluster, ClusterCredential, Node
from pool.services.credentials import credential_read
from pool.services.polling import cluster_poll
from portal.accounts.models import User
from portal.kernel.clock import now
from portal.ops.models import AuditEvent
from tests.pool import builders
from tests.pool.executors.memory import MemorySystem, Run
from tests.quotas import build

pytestmark = pytest.mark.django_db
CARDS = tuple(
    {"uuid": f"SLURM-hpc7-a100-{n}", "index": n, "name": "A100", "memory_mib": 40960, "mig": {}}
    for n in range(2)
)


@pytest.fixture
def admin() -> User:
    made = build.user("zhao")
    build.role(made, "pool_admin")
    return made


@pytest.fixture
def cluster(memory: MemorySystem) -> Cluster:
    memory.nodes = [Found("hpc7", gpus=CARDS, cpu_milli=32000, memory_mib=65536)]
    return builders.cluster("hpc", executor="slurm")


def act(client: Client, cluster: Cluster, what: str, **values: str):
    return client.post(reverse("pool:cluster-act", args=[cluster.uid, what]), values)


def test_a_cluster_is_made_and_its_mistakes_are_named(client: Client, admin: User) -> None:
    builders.cluster("old")
    client.force_login(admin)
    values = {"code": "hpc", "name": "HPC", "site": "bj", "executor": "slurm"}
    wrong = {
        **values,
        "settings": json.dumps({"transport": "telnet", "jwt_token": "x", "folder": "relative"}),
    }
    answer = client.post(reverse("pool:cluster-new"), wrong)
    page = answer.content.decode()
    assert answer.status_code == 400
    assert not Cluster.objects.filter(code="hpc").exists()
    for word in ("transport: not_a_choice", "folder: not_an_absolute_path", "jwt_token", "telnet"):
        assert word in page
    assert client.post(reverse("pool:cluster-new"), {**values, "settings": "{not json"}).status_code == 400
    good = {**values, "settings": json.dumps({"partition": "batch", "folder": "/shared/gpupool"})}
    assert client.post(reverse("pool:cluster-new"), good).status_code == 302
    made = Cluster.objects.get(code="hpc")
    assert made.settings == {"partition": "batch", "folder": "/shared/gpupool"}
    assert client.get(reverse("pool:clusters")).status_code == 200


def test_nodes_are_shown_before_they_are_taken_in(client: Client, admin: User, cluster: Cluster) -> None:
    client.force_login(admin)
    page = act(client, cluster, "discover").content.decode()
    assert "hpc7" in page
    assert "2 × A100" in page
    assert not Node.objects.filter(name="hpc7").exists()
    assert act(client, cluster, "import").status_code == 302
    node = Node.objects.get(name="hpc7")
    assert (node.cluster, node.gpus.count(), node.cpu_milli) == (cluster, 2, 32000)
    assert act(client, cluster, "import").status_code == 302
    assert Node.objects.filter(name="hpc7").count() == 1
    assert AuditEvent.objects.filter(action="cluster.nodes_imported").count() == 1


def test_limits_are_pushed_only_as_they_were_seen(
    client: Client, admin: User, cluster: Cluster, memory: MemorySystem
) -> None:
    client.force_login(admin)
    memory.there = [Limit("ml", "gres/gpu", None, 6), Limit("cv", "gres/gpu", 2, 2)]
    page = act(client, cluster, "limits").content.decode()
    assert "gres/gpu" in page
    assert "cv" not in page.split("gres/gpu")[0].split("<tbody>")[-1]
    stale = act(client, cluster, "push", seen=json.dumps([["ml", "gres/gpu", None, 5]]))
    assert stale.status_code == 409
    assert "limits_set" not in memory.calls
    assert act(client, cluster, "push", seen=json.dumps([["ml", "gres/gpu", None, 6]])).status_code == 302
    assert memory.there[0].there == 6


def test_a_system_that_is_away_is_said_and_nothing_changes(
    client: Client, admin: User, cluster: Cluster, memory: MemorySystem
) -> None:
    client.force_login(admin)
    memory.away = True
    answer = act(client, cluster, "discover")
    assert answer.status_code == 503
    assert "nobody answers" in answer.content.decode()
    assert not Node.objects.filter(cluster=cluster).exists()


def test_a_credential_is_sealed_and_shown_to_nobody(client: Client, admin: User, cluster: Cluster) -> None:
    client.force_login(admin)
    assert act(client, cluster, "credential", name="jwt", value="a-very-secret-token").status_code == 302
    row = ClusterCredential.objects.get()
    assert "a-very-secret-token" not in row.sealed
    assert credential_read(cluster=cluster, name="jwt") == "a-very-secret-token"
    shown = client.get(reverse("pool:cluster", args=[cluster.uid])).content.decode()
    shown += client.get(f"/api/v1/clusters/{cluster.uid}/").content.decode()
    assert "a-very-secret-token" not in shown
    assert row.sealed not in shown
    assert "zhao" in shown.lower()
    assert not AuditEvent.objects.filter(after__icontains="a-very-secret-token").exists()
    assert act(client, cluster, "credential", name="root_password", value="x").status_code == 404
    assert act(client, cluster, "credential", name="jwt", value="").status_code == 302
    assert credential_read(cluster=cluster, name="jwt") is None


def test_only_pool_administrators_come_here(client: Client, cluster: Cluster) -> None:
    who = build.user("lin")
    build.role(who, "researcher", build.department("vg"))
    client.force_login(who)
    for address in (
        reverse("pool:clusters"),
        reverse("pool:cluster", args=[cluster.uid]),
        reverse("pool:cluster-new"),
        reverse("pool:cluster-adopt", args=[cluster.uid]),
        f"/api/v1/clusters/{cluster.uid}/outside-work/",
        f"/api/v1/clusters/{cluster.uid}/",
        "/api/v1/clusters/",
    ):
        assert client.get(address).status_code == 403, address
    assert act(client, cluster, "import").status_code == 403
    answer = client.post(
        f"/api/v1/clusters/{cluster.uid}/import-nodes/", {"dry_run": False}, "application/json"
    )
    assert answer.status_code == 403
    assert not Node.objects.filter(name="hpc7").exists()


def test_the_api_does_the_same(client: Client, admin: User, cluster: Cluster) -> None:
    client.force_login(admin)

    def post(path: str, body: object):
        return client.post(f"/api/v1/clusters/{cluster.uid}/{path}/", body, "application/json")

    assert post("check", {}).json() == {
        "ok": True,
        "findings": [{"code": "controller_answers", "ok": True, "detail": ""}],
    }
    told = post("import-nodes", {}).json()
    assert (told["dry_run"], told["new"], told["gpus"]) == (True, ["hpc7"], 2)
    assert not Node.objects.filter(name="hpc7").exists()
    assert post("import-nodes", {"dry_run": False, "names": ["other"]}).json()["new"] == []
    assert post("import-nodes", {"dry_run": False, "names": ["hpc7"]}).json()["new"] == ["hpc7"]
    assert post("import-nodes", {"dry_run": False, "colour": "red"}).status_code == 400
    assert post("credential", {"name": "jwt", "value": "t"}).status_code == 204
    assert client.get(f"/api/v1/clusters/{cluster.uid}/").json()["credentials"] == ["jwt"]
    changed = client.patch(
        f"/api/v1/clusters/{cluster.uid}/", {"name": "New"}, "application/json", headers={"If-Match": '"99"'}
    )
    assert changed.status_code == 412


@pytest.fixture
def running(cluster: Cluster, memory: MemorySystem) -> Run:
    """Work of somebody there, as the last look saw it, and a person whom it could be."""
    team, flavour = build.department("vg"), build.flavour("h800", installed=None)
    builders.node(flavour, 2, cluster, name="hpc1")
    build.limits(team, flavour, 4)
    build.role(build.user("wang", team), "researcher", team)
    memory.nodes = [Found("hpc1")]
    run = Run("77", None, 0, "hpc1", indexes=(1,), started_at=now())
    memory.runs.append(run)
    cluster_poll(cluster_id=cluster.pk, nodes=True)
    return run


def test_running_work_is_taken_in_from_its_cluster(
    client: Client, admin: User, cluster: Cluster, running: Run
) -> None:
    client.force_login(admin)
    address = reverse("pool:cluster-adopt", args=[cluster.uid])
    assert f"{address}?work=77" in client.get(reverse("pool:cluster", args=[cluster.uid])).content.decode()
    node = reverse("pool:node", args=[Node.objects.get(name="hpc1").uid])
    assert f"{address}?work=77" in client.get(node).content.decode()
    form = client.get(address, {"work": "77"}).content.decode()
    assert 'name="person" list="people" value="wang"' in form  # who it runs as there is a person's name here
    assert '<option value="vg" selected>' in form
    assert client.get(address, {"work": "78"}).status_code == 404
    sent = {"work": "77", "person": "wang", "department": "vg", "hours": "2", "purpose": ""}
    refused = client.post(address, sent)
    assert refused.status_code == 400
    assert 'id="e-purpose"' in refused.content.decode()
    for hours in ("", "x", "-1", "0", "99999999"):
        wrong = client.post(address, {**sent, "purpose": "ran before", "hours": hours})
        assert wrong.status_code == 400, hours
        assert 'id="e-hours"' in wrong.content.decode(), hours
    assert running.uid is None
    done = client.post(address, {**sent, "purpose": "ran before", "interruptible": "no"})
    made = Allocation.objects.get()
    assert (done.status_code, done["Location"]) == (302, reverse("pool:allocation", args=[made.uid]))
    assert (made.holder.username, made.request.duration_s, running.uid) == ("wang", 7200, made.uid)
    client.force_login(made.holder)
    for page in (done["Location"], reverse("quotas:request-detail", args=[made.request.uid])):
        assert client.get(page).status_code == 200


def test_the_api_takes_running_work_in(client: Client, admin: User, cluster: Cluster, running: Run) -> None:
    who = User.objects.get(username="wang")
    address = f"/api/v1/clusters/{cluster.uid}"
    sent = {"work": "77", "person": "wang", "department": "vg", "duration_s": 60, "purpose": "ran before"}
    client.force_login(who)
    assert client.post(f"{address}/adopt/", sent, "application/json").status_code == 403
    assert client.get(f"{address}/outside-work/").status_code == 403
    client.force_login(admin)
    assert [work["id"] for work in client.get(f"{address}/outside-work/").json()] == ["77"]
    assert client.post(f"{address}/adopt/", {**sent, "gpus": 9}, "application/json").status_code == 400
    gone = client.post(f"{address}/adopt/", {**sent, "work": "78"}, "application/json")
    assert (gone.status_code, gone.json()["code"]) == (409, "work_not_running")
    answer = client.post(f"{address}/adopt/", sent, "application/json")
    made = Allocation.objects.get()
    told = {"allocation": str(made.uid), "request": str(made.request.uid), "ref": made.ref}
    assert (answer.status_code, answer.json()) == (201, told)
    assert client.get(f"{address}/outside-work/").json() == []


def test_the_pages_stay_within_their_budget(client: Client, admin: User, cluster: Cluster) -> None:
    client.force_login(admin)
    for address in (reverse("pool:clusters"), reverse("pool:cluster", args=[cluster.uid])):
        with CaptureQueriesContext(
            connection,
        ) as seen:
            page = client.get(address)
        assert len(seen) <= 15
        assert len(page.content) < 60_000
