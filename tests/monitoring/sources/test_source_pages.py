"""Pages of telemetry sources: made, looked at before it is switched on, mended, and switched off."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from monitoring.models import GpuSample, GpuState, MetricSource, SourceCard
from monitoring.services import ingest, intake
from monitoring.services.scrape import source_scrape
from monitoring.services.source_check import source_check
from pool.models import Cluster, ClusterCredential
from portal.accounts.models import User
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident
from tests.monitoring import builders as b
from tests.monitoring.sources.server import Exporter, serving

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with serving() as running, set_clock(T0):
        yield running


@pytest.fixture
def chief() -> User:
    return b.person("chief", "pool_admin")


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def line(uuid: str, util: int = 40, **labels: str) -> str:
    told = "".join(f',{name}="{value}"' for name, value in labels.items())
    return f'DCGM_FI_DEV_GPU_UTIL{{UUID="{uuid}"{told}}} {util}\n'


def uuid_of(number: int) -> str:
    return f"GPU-0000000{number}-1111-4222-8333-00000000000{number}"


def typed(exporter: Exporter, **more: str) -> dict[str, str]:
    return {
        "name": "dcgm", "cluster": Cluster.objects.get().code, "kind": "exporter", "query": "", "auth": "none",
        "url": exporter.url + "/{node}/metrics", "username": "", "secret": "", "every_s": "15", **more,
    }  # fmt: skip


def test_made_looked_at_switched_on_and_off(
    exporter: Exporter, chief: User, django_assert_max_num_queries: Any
) -> None:
    first, second = b.node("k8s-01", 0), b.node("k8s-02", 0)
    taken, covered = (b.gpu(first, n, uuid=uuid_of(1 + n)) for n in range(2))
    placed, twice = b.gpu(second, 0, uuid="K8S-x-0"), b.gpu(second, 1, uuid=uuid_of(4))
    batch, _ = intake.batch_of(
        node_id=first.pk, message=b.message(b.row(covered, T0 - timedelta(seconds=30), util=88))
    )
    ingest.samples_write(batches=[batch])
    rows = GpuSample.objects.count()
    mine = signed_in(chief)
    assert "Nothing is fetched" in mine.get(reverse("monitoring:sources")).content.decode()
    made = mine.post(reverse("monitoring:source-new"), typed(exporter, auth="bearer", secret="s3cr3t-token"))
    source = MetricSource.objects.get()
    assert (made.status_code, made["Location"]) == (302, reverse("monitoring:source", args=[source.uid]))
    assert not source.active, "it waits until somebody has looked at the dry run"

    exporter.bodies["/k8s-01/metrics"] = line(taken.uuid) + line(covered.uuid) + line(twice.uuid) + "what\n"
    exporter.bodies["/k8s-02/metrics"] = (
        line(uuid_of(3), gpu="0") + line(twice.uuid) + line(uuid_of(9), modelName="NVIDIA H20")
    )
    look = mine.post(reverse("monitoring:source-act", args=[source.uid, "check"]))
    page = look.content.decode()
    assert look.status_code == 200 and "s3cr3t" not in page
    found = source_check(acting_user=SYSTEM, source=source)
    assert [(m.state, m.uuid, m.gpu) for m in found.matches] == [
        ("double", twice.uuid, twice),
        ("unknown", uuid_of(9), None),
        ("covered", covered.uuid, covered),
        ("placed", uuid_of(3), placed),
        ("taken", taken.uuid, taken),
    ]
    assert found.matches[0].others == ("k8s-01",) and found.problems == {"bad_line": 1}
    for word in (
        "claimed twice", "also claimed by k8s-01", "not in the inventory", "NVIDIA H20", "left to a better source",
        "known by node and index", "known by UUID", "k8s-01/0", "lines that cannot be read: 1", "2 addresses",
    ):  # fmt: skip
        assert word in page, word
    assert GpuSample.objects.count() == rows and not SourceCard.objects.exists(), "a dry run keeps nothing"
    assert not Incident.objects.exists() and MetricSource.objects.get().last_at is None

    assert mine.post(reverse("monitoring:source-act", args=[source.uid, "on"])).status_code == 302
    assert source_scrape(source_id=source.pk)["cards"] == 3
    page = mine.get(reverse("monitoring:source", args=[source.uid])).content.decode()
    for word in (
        "answers",
        "k8s-01/0",
        "sealed, set by Chief",
        "cards that are not in the inventory",
        "metric_source",
    ):
        assert word in page, word
    assert "s3cr3t" not in page
    with django_assert_max_num_queries(10):
        listed = mine.get(reverse("monitoring:sources")).content.decode()
    assert "dcgm" in listed and "answers" in listed and "cards that a better source reports" in listed
    chief.language = "zh-hans"
    chief.save()
    assert "能应答" in mine.get(reverse("monitoring:sources")).content.decode()
    assert mine.post(reverse("monitoring:source-act", args=[source.uid, "off"])).status_code == 302
    assert not MetricSource.objects.get().active
    actions = AuditEvent.objects.filter(object_uid=source.uid).order_by("id").values_list("action", flat=True)
    assert list(actions) == ["metric_source.added", "metric_source.changed", "metric_source.changed"]


def test_a_source_that_fails_says_why_and_since_when(exporter: Exporter, chief: User) -> None:
    card = b.gpu(b.node("k8s-01", 0), 0, uuid=uuid_of(1))
    exporter.bodies["/k8s-01/metrics"] = line(card.uuid)
    mine = signed_in(chief)
    mine.post(reverse("monitoring:source-new"), typed(exporter, active="on"))
    source = MetricSource.objects.get()
    source_scrape(source_id=source.pk)
    exporter.status = 401
    with set_clock(T0 + timedelta(minutes=1)):
        source_scrape(source_id=source.pk)
        page = mine.get(reverse("monitoring:source", args=[source.uid])).content.decode()
        assert "refuses our sign-in" in page and "It answered well last at" in page
        assert "refuses our sign-in" in mine.get(reverse("monitoring:sources")).content.decode()
        check = mine.post(reverse("monitoring:source-act", args=[source.uid, "check"])).content.decode()
        assert "refuses our sign-in" in check
    with set_clock(T0 + timedelta(hours=1)):
        page = mine.get(reverse("monitoring:source", args=[source.uid])).content.decode()
        assert "not fetched for long" in page and "worker" in page
    assert GpuState.objects.get().at == T0, "a failed fetch writes nothing"


def test_what_was_typed_stays_and_an_empty_secret_keeps_the_one_there(
    exporter: Exporter, chief: User
) -> None:
    b.node("k8s-01", 1)
    mine = signed_in(chief)
    wrong = mine.post(
        reverse("monitoring:source-new"),
        typed(exporter, url="ftp://x/metrics", every_s="often", auth="bearer", secret="s3cr3t-token"),
    )
    page = wrong.content.decode()
    assert wrong.status_code == 400 and "ftp://x/metrics" in page and "From 5 to 3600 seconds." in page
    assert "s3cr3t" not in page and not MetricSource.objects.exists()
    assert mine.post(reverse("monitoring:source-new"), typed(exporter, cluster="gone")).status_code == 400
    mine.post(reverse("monitoring:source-new"), typed(exporter, auth="bearer", secret="s3cr3t-token"))
    source = MetricSource.objects.get()
    address = reverse("monitoring:source-edit", args=[source.uid])
    assert "s3cr3t" not in mine.get(address).content.decode()
    sealed = ClusterCredential.objects.get().sealed
    change = typed(exporter, auth="bearer", every_s="60") | {"seen": str(source.version)}
    assert mine.post(address, change).status_code == 302
    assert MetricSource.objects.get().every_s == 60 and ClusterCredential.objects.get().sealed == sealed
    late = mine.post(address, change | {"every_s": "30"})
    assert late.status_code == 409 and MetricSource.objects.get().every_s == 60
    assert mine.post(address, change | {"auth": "none", "seen": ""}).status_code == 302
    assert not ClusterCredential.objects.exists()


def test_pages_and_acts_are_for_administrators(exporter: Exporter, chief: User) -> None:
    b.node("k8s-01", 1)
    signed_in(chief).post(reverse("monitoring:source-new"), typed(exporter))
    source = MetricSource.objects.get()
    other = signed_in(b.person("other", where=b.department()))
    auditor = signed_in(b.person("auditor", "auditor"))
    for client in (other, auditor):
        calls: list[Any] = [
            client.get(reverse("monitoring:sources")),
            client.get(reverse("monitoring:source", args=[source.uid])),
            client.get(reverse("monitoring:source-new")),
            client.post(reverse("monitoring:source-edit", args=[source.uid]), typed(exporter, name="mine")),
            *(
                client.post(reverse("monitoring:source-act", args=[source.uid, act]))
                for act in ("check", "fetch", "on", "off")
            ),
        ]
        assert [answer.status_code for answer in calls] == [403] * len(calls)
    source.refresh_from_db()
    assert (source.name, source.active) == ("dcgm", False) and exporter.asked == []
