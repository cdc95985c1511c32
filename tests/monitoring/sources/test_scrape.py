"""Sources that are fetched: from the address to the database, with everything that can be wrong with an answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from monitoring.models import GpuEvent, GpuSample, GpuState, MetricSource, SourceCard
from monitoring.selectors.sources import silent_since
from monitoring.services.health import health_judge
from monitoring.services.scrape import source_scrape, targets_of
from monitoring.services.sources import source_hasten, source_save, sources_claim
from monitoring.sources import fetch as fetching
from pool.models import Cluster, ClusterCredential, Gpu, Node
from portal.accounts.models import Role
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, DomainError, Invalid
from portal.ops.actor import SYSTEM, Actor
from portal.ops.models import AuditEvent, Incident
from tests.monitoring import builders as b
from tests.monitoring.sources.server import Exporter, serving
from tests.samples import authored

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with serving() as running:
        yield running


@pytest.fixture
def frozen() -> Iterator[None]:
    with set_clock(T0):
        yield


def uuid_of(number: int) -> str:
    return f"GPU-0000000{number}-1111-4222-8333-00000000000{number}"


def cards(name: str = "k8s-01", count: int = 2, first: int = 1) -> tuple[Node, list[Gpu]]:
    node = b.node(name, 0)
    return node, [b.gpu(node, n, uuid=uuid_of(first + n)) for n in range(count)]


def source(exporter: Exporter, path: str = "/metrics", **more: Any) -> MetricSource:
    values = {"name": "dcgm", "kind": "exporter", "url": exporter.url + path, **more}
    secret = values.pop("secret", None)
    return source_save(acting_user=SYSTEM, cluster=Cluster.objects.get(), values=values, secret=secret)


def series(uuid: str, **values: Any) -> str:
    names = {
        "util": "GPU_UTIL",
        "used": "FB_USED",
        "free": "FB_FREE",
        "temp": "GPU_TEMP",
        "xid": "XID_ERRORS",
    }
    return "".join(f'DCGM_FI_DEV_{names[k]}{{gpu="0",UUID="{uuid}"}} {v}\n' for k, v in values.items())


def test_what_an_exporter_says_is_written_as_an_agents_row_would_be(exporter: Exporter, frozen: None) -> None:
    node, (one, two) = cards()
    exporter.bodies["/metrics"] = series(one.uuid, util=97, used=39094, free=1211, temp=61) + series(
        two.uuid, util=0
    )
    facts = source_scrape(source_id=source(exporter).pk)
    assert (facts["code"], facts["cards"], facts["rows"], facts["new"]) == ("ok", 2, 2, 2)
    state = GpuState.objects.get(gpu=one)
    assert (state.at, state.util_pm, state.mem_used_mib, state.mem_total_mib, state.temp_c) == (
        T0,
        970,
        39094,
        40305,
        61,
    )
    assert (state.source, state.missing["power_mw"], state.missing["processes"]) == (
        "exporter",
        "not_reported",
        "not_reported",
    )
    assert GpuState.objects.get(gpu=two).mem_total_mib == 81559, (
        "what a source does not tell, the inventory knows"
    )
    assert GpuSample.objects.filter(gpu_id=one.pk).values_list("util_pm", "temp_c").get() == (970, 61)
    kept = MetricSource.objects.get()
    assert (kept.last_code, kept.last_at, kept.last_ok_at, kept.last_facts["codes"]) == (
        "ok",
        T0,
        T0,
        {"ok": 1},
    )
    assert source_scrape(source_id=kept.pk)["new"] == 0, "a second fetch of the same moment adds nothing"


def test_one_address_for_each_node_and_a_card_of_another_is_an_incident_p21(
    exporter: Exporter, frozen: None
) -> None:
    first, (mine,) = cards("k8s-01", 1)
    _, (other,) = cards("k8s-02", 1, first=2)
    made = source(exporter, "/{node}/metrics")
    assert [t.url.removeprefix(exporter.url) for t in targets_of(made)] == [
        "/k8s-01/metrics",
        "/k8s-02/metrics",
    ]
    exporter.bodies["/k8s-01/metrics"] = series(mine.uuid, util=40) + series(other.uuid, util=99)
    exporter.bodies["/k8s-02/metrics"] = series(other.uuid, util=7)
    facts = source_scrape(source_id=made.pk)
    assert (facts["code"], facts["cards"]) == ("ok", 2)
    assert {s.gpu_id: s.util_pm for s in GpuState.objects.all()} == {mine.pk: 400, other.pk: 70}
    incident = Incident.objects.get()
    assert (incident.kind, incident.facts["reported_by"], incident.facts["belongs_to"]) == (
        "gpu_uuid_twice",
        "k8s-01",
        "k8s-02",
    )
    exporter.bodies["/k8s-02/metrics"] = ""
    GpuState.objects.all().delete()
    with set_clock(T0 + timedelta(seconds=15)):
        facts = source_scrape(source_id=made.pk)
    assert facts["problems"] == {"foreign": 1} and not GpuState.objects.filter(gpu=other).exists()
    assert Incident.objects.get().pk == incident.pk, "the same claim is the same incident"
    other.refresh_from_db()
    assert other.node.name == "k8s-02"


def test_two_hosts_of_one_server_that_claim_a_card(exporter: Exporter, frozen: None) -> None:
    _, (card,) = cards("k8s-01", 1)
    rows = [
        {
            "metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": card.uuid, "Hostname": host},
            "value": [T0.timestamp(), u],
        }
        for host, u in (("k8s-08", "3"), ("k8s-09", "5"))
    ]
    exporter.bodies["/api/v1/query"] = json.dumps(
        {"status": "success", "data": {"resultType": "vector", "result": rows}}
    )
    facts = source_scrape(source_id=source(exporter, "", kind="prometheus").pk)
    assert facts["problems"] == {"foreign": 1} and not GpuState.objects.exists()
    assert Incident.objects.get().facts["reported_by"] == "k8s-08, k8s-09"


def test_a_made_up_identity_is_met_once_by_place_and_then_by_uuid_p21(
    exporter: Exporter, frozen: None
) -> None:
    """Kubernetes tells no UUIDs: node and index say which card it is, and an index that changes later does not."""
    node = b.node("k8s-01", 0)
    zero, one = (b.gpu(node, n, uuid=f"K8S-abc-{n}") for n in range(2))
    made = source(exporter, "/{node}/metrics")

    def line(index: int, uuid: str, util: int) -> str:
        return f'DCGM_FI_DEV_GPU_UTIL{{gpu="{index}",UUID="{uuid}"}} {util}\n'

    exporter.bodies["/k8s-01/metrics"] = line(0, uuid_of(1), 11) + line(1, uuid_of(2), 22)
    assert source_scrape(source_id=made.pk)["cards"] == 2
    assert dict(GpuState.objects.values_list("gpu_id", "util_pm")) == {zero.pk: 110, one.pk: 220}
    exporter.bodies["/k8s-01/metrics"] = line(0, uuid_of(2), 44) + line(1, uuid_of(1), 33)
    with set_clock(T0 + timedelta(seconds=15)):
        source_scrape(source_id=made.pk)
    assert dict(GpuState.objects.values_list("gpu_id", "util_pm")) == {zero.pk: 330, one.pk: 440}
    exporter.bodies["/k8s-01/metrics"] = (
        line(0, uuid_of(3), 55) + line(1, uuid_of(1), 66) + line(7, uuid_of(4), 1)
    )
    with set_clock(T0 + timedelta(seconds=30)):
        facts = source_scrape(source_id=made.pk)
    assert (facts["cards"], facts["problems"]) == (1, {"unknown": 2}), (
        "index 0 is taken by a card that is there"
    )
    assert dict(GpuState.objects.values_list("gpu_id", "util_pm")) == {zero.pk: 660, one.pk: 440}
    exporter.bodies["/k8s-01/metrics"] = line(0, uuid_of(1), 77) + line(1, uuid_of(3), 88)
    with set_clock(T0 + timedelta(seconds=45)):
        source_scrape(source_id=made.pk)
    assert dict(SourceCard.objects.values_list("gpu_id", "uuid")) == {zero.pk: uuid_of(1), one.pk: uuid_of(3)}


def test_a_card_that_moved_to_another_node_is_met_there(exporter: Exporter, frozen: None) -> None:
    here, there = b.node("k8s-01", 0), b.node("k8s-02", 0)
    before, after = b.gpu(here, 0, uuid="K8S-a-0"), b.gpu(there, 0, uuid="K8S-b-0")
    made = source(exporter, "/{node}/metrics")
    exporter.bodies |= {"/k8s-01/metrics": series(uuid_of(1), util=11), "/k8s-02/metrics": ""}
    source_scrape(source_id=made.pk)
    exporter.bodies |= {"/k8s-01/metrics": "", "/k8s-02/metrics": series(uuid_of(1), util=22)}
    with set_clock(T0 + timedelta(seconds=15)):
        assert source_scrape(source_id=made.pk)["cards"] == 1
    assert dict(GpuState.objects.values_list("gpu_id", "util_pm")) == {before.pk: 110, after.pk: 220}
    assert dict(SourceCard.objects.values_list("gpu_id", "uuid")) == {before.pk: "", after.pk: uuid_of(1)}
    assert not Incident.objects.exists()


def test_a_prometheus_server_is_asked_with_its_times(exporter: Exporter, frozen: None) -> None:
    _, (card,) = cards("gpu-node-07", 1)
    Gpu.objects.filter(pk=card.pk).update(uuid="GPU-a000000a-1111-4222-8333-00000000000a")
    body = authored("dcgm/08_prometheus_api_exported_labels.json").replace(
        "1700000000.123", str(T0.timestamp() - 20)
    )
    exporter.bodies["/prom/api/v1/query"] = body
    made = source(exporter, "/prom/", kind="prometheus", auth="basic", username="reader", secret="geheim")
    facts = source_scrape(source_id=made.pk)
    assert (facts["code"], facts["cards"], facts["problems"]) == ("ok", 1, {"unknown": 1})
    state = GpuState.objects.get()
    assert (state.at, state.util_pm, state.source) == (T0 - timedelta(seconds=20), 990, "prometheus")
    assert SourceCard.objects.get().workloads == [
        {"namespace": "dept-a", "pod": "train-llm-0", "container": "main"}
    ]
    path, headers = exporter.asked[0]
    assert "DCGM_FI_DEV_GPU_UTIL" in path and "nvidia_smi_" in path
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"reader:geheim").decode()
    exporter.bodies["/prom/api/v1/query"] = authored("dcgm/08_prometheus_api_exported_labels.json")
    facts = source_scrape(source_id=made.pk)
    assert facts["problems"] == {"unknown": 1, "too_old": 1} and facts["rows"] == 0


def test_a_card_that_its_agent_reports_is_left_to_the_agent(exporter: Exporter, frozen: None) -> None:
    from monitoring.services import ingest, intake

    node, (card,) = cards("k8s-01", 1)
    made = source(exporter)
    exporter.bodies["/metrics"] = series(card.uuid, util=1)
    batch, _ = intake.batch_of(
        node_id=node.pk, message=b.message(b.row(card, T0 - timedelta(seconds=30), util=88))
    )
    ingest.samples_write(batches=[batch])
    assert source_scrape(source_id=made.pk)["problems"] == {"covered": 1}
    state = GpuState.objects.get()
    assert (state.util_pm, state.source, len(state.processes)) == (880, "agent", 1)
    with set_clock(T0 + timedelta(minutes=3)):
        assert source_scrape(source_id=made.pk)["cards"] == 1
    state.refresh_from_db()
    assert (state.util_pm, state.source) == (10, "exporter")


def test_quiet_needs_two_signals_where_processes_are_not_told(exporter: Exporter, frozen: None) -> None:
    """Below 5 % but not 0, and nobody knows the processes: unknown, never idle."""
    _, (card,) = cards("k8s-01", 1)
    made = source(exporter)
    exporter.bodies["/metrics"] = series(card.uuid, util=3, used=70000)
    source_scrape(source_id=made.pk)
    assert GpuState.objects.get().quiet_since is None
    exporter.bodies["/metrics"] = series(card.uuid, util=0, used=70000)
    with set_clock(T0 + timedelta(seconds=15)):
        source_scrape(source_id=made.pk)
    assert GpuState.objects.get().quiet_since == T0 + timedelta(seconds=15)


def test_xids_counts_before_the_gauge_and_the_gauge_only_when_it_changes_p16(
    exporter: Exporter, frozen: None
) -> None:
    _, (card,) = cards("k8s-01", 1)
    made = source(exporter)

    def fetch(after_s: int, gauge: int, **counts: int) -> list[int]:
        lines = [
            f'DCGM_EXP_XID_ERRORS_COUNT{{UUID="{card.uuid}",window_size_in_ms="300000",xid="{code[1:]}"}} {n}\n'
            for code, n in counts.items()
        ]
        exporter.bodies["/metrics"] = series(card.uuid, util=5, xid=gauge) + "".join(lines)
        with set_clock(T0 + timedelta(seconds=after_s)):
            source_scrape(source_id=made.pk)
        return list(GpuEvent.objects.order_by("id").values_list("code", flat=True))

    assert fetch(0, 31) == [], "a gauge that stood there at the first look is of an unknown time"
    assert fetch(15, 31) == [] and fetch(30, 43) == [43]
    assert fetch(45, 43) == [43]
    assert fetch(60, 45, x45=1, x62=1) == [43, 45, 62], "62 hides behind 45 in the gauge"
    assert fetch(75, 45, x45=1, x62=1) == [43, 45, 62]
    assert fetch(90, 45, x45=2) == [43, 45, 62, 45], "two of one code are two events"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"status": 401}, "unauthorized"),
        ({"status": 403}, "unauthorized"),
        ({"status": 500}, "refused"),
        ({"status": 302, "location": "http://127.0.0.1:1/elsewhere"}, "refused"),
        ({"endless": True}, "too_large"),
        ({"slow_s": 0.5}, "timeout"),
    ],
)
def test_failures_have_codes_and_write_nothing(
    exporter: Exporter, frozen: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], code: str
) -> None:
    _, (card,) = cards("k8s-01", 1)
    exporter.bodies["/metrics"] = series(card.uuid, util=5)
    vars(exporter).update(change)
    monkeypatch.setattr(fetching, "CONNECT_S", 0.2)
    made = source(exporter)
    facts = source_scrape(source_id=made.pk)
    assert (facts["code"], facts["rows"]) == (code, 0) and not GpuState.objects.exists()
    kept = MetricSource.objects.get()
    assert (kept.last_code, kept.last_ok_at) == (code, None)


def test_nobody_listens(exporter: Exporter, frozen: None) -> None:
    cards("k8s-01", 1)
    made = source(exporter)
    MetricSource.objects.update(url="http://127.0.0.1:1/metrics")
    assert source_scrape(source_id=made.pk)["code"] == "unreachable"


def test_a_cut_body_is_read_as_far_as_it_is_whole(exporter: Exporter, frozen: None) -> None:
    _, (one, two) = cards()
    body = series(one.uuid, util=50) + series(two.uuid, used=80000)
    exporter.bodies["/metrics"], exporter.cut_at = body, len(body) - 4
    facts = source_scrape(source_id=source(exporter).pk)
    assert (facts["code"], facts["problems"], facts["cards"]) == ("cut", {"cut": 1}, 1)
    assert list(GpuState.objects.values_list("gpu_id", "util_pm")) == [(one.pk, 500)]


def test_a_body_of_fifty_megabytes_is_refused_whole() -> None:
    with serving() as exporter:
        exporter.bodies["/metrics"] = b'DCGM_FI_DEV_GPU_UTIL{UUID="x"} 1\n' * 1_600_000
        got = fetching.fetch(exporter.url + "/metrics")
    assert (got.code, got.body) == ("too_large", b"")


def test_the_secret_is_sealed_and_never_told(exporter: Exporter, frozen: None) -> None:
    _, (card,) = cards("k8s-01", 1)
    exporter.bodies["/metrics"] = series(card.uuid, util=5)
    made = source(exporter, auth="bearer", secret="s3cr3t-token")
    assert source_scrape(source_id=made.pk)["code"] == "ok"
    assert exporter.asked[0][1]["Authorization"] == "Bearer s3cr3t-token"
    assert "s3cr3t" not in ClusterCredential.objects.get().sealed
    assert "s3cr3t" not in json.dumps(list(AuditEvent.objects.values()), default=str)
    assert "s3cr3t" not in json.dumps(list(MetricSource.objects.values()), default=str)
    changed = source_save(acting_user=SYSTEM, cluster=made.cluster, values={"every_s": 30}, source=made)
    assert (changed.every_s, changed.auth) == (30, "bearer") and source_scrape(source_id=made.pk)[
        "code"
    ] == "ok"
    ClusterCredential.objects.all().delete()
    assert source_scrape(source_id=made.pk)["code"] == "secret_missing"


@pytest.mark.parametrize(
    ("values", "secret", "pointer"),
    [
        ({"name": ""}, None, "name"),
        ({"kind": "graphite"}, None, "kind"),
        ({"url": "ftp://x/metrics"}, None, "url"),
        ({"url": "http://me:pw@x/metrics"}, None, "url"),
        ({"url": "http://{host}/metrics"}, None, "url"),
        ({"url": "http://x:99999/"}, None, "url"),
        ({"kind": "prometheus", "url": "http://{node}:9090"}, None, "url"),
        ({"query": "up"}, None, "query"),
        ({"auth": "bearer"}, None, "secret"),
        ({"auth": "none"}, "x", "secret"),
        ({"auth": "basic"}, "x", "username"),
        ({"every_s": 4}, None, "every_s"),
        ({"every_s": 3601}, None, "every_s"),
    ],
)
def test_a_source_that_cannot_be_is_refused_and_nothing_written(
    exporter: Exporter, values: dict[str, Any], secret: str | None, pointer: str
) -> None:
    cards("k8s-01", 1)
    with pytest.raises(Invalid) as caught:
        source(exporter, **values, secret=secret)
    assert pointer in {e["pointer"] for e in caught.value.errors}
    assert not MetricSource.objects.exists() and not AuditEvent.objects.exists()


def test_names_are_one_and_changes_meet(exporter: Exporter) -> None:
    cards("k8s-01", 1)
    made = source(exporter)
    with pytest.raises(Conflict):
        source(exporter)
    source_save(acting_user=SYSTEM, cluster=made.cluster, values={"every_s": 60}, source=made)
    with pytest.raises(Conflict):
        source_save(
            acting_user=SYSTEM, cluster=made.cluster, values={"every_s": 5}, source=made, version=made.version
        )
    assert MetricSource.objects.get().every_s == 60


def test_only_administrators_of_the_pool(exporter: Exporter) -> None:
    cards("k8s-01", 1)
    person = b.person("somebody", Role.RESEARCHER, b.department())
    with pytest.raises(DomainError):
        source_save(
            acting_user=Actor(user=person),
            cluster=Cluster.objects.get(),
            values={"name": "x", "kind": "exporter", "url": exporter.url},
        )
    assert not MetricSource.objects.exists()


def test_a_due_source_is_given_to_one_caller(exporter: Exporter, frozen: None) -> None:
    cards("k8s-01", 1)
    made = source(exporter, every_s=15)
    off = source(exporter, name="off", active=False)
    assert sources_claim() == [made.pk] and sources_claim() == []
    source_hasten(acting_user=SYSTEM, source=made)
    assert sources_claim() == [made.pk]
    with set_clock(T0 + timedelta(seconds=14)):
        assert sources_claim() == []
    with set_clock(T0 + timedelta(seconds=15)):
        assert sources_claim() == [made.pk]
    assert MetricSource.objects.get(pk=off.pk).due_at is None


def test_a_source_that_goes_silent_opens_one_incident_that_closes_when_it_is_back(exporter: Exporter) -> None:
    """Refused, then a whole answer without a card in it: both are silence, and one incident until it answers well."""

    def heard(seconds: int) -> str:
        with set_clock(T0 + timedelta(seconds=seconds)):
            return str(source_scrape(source_id=made.pk)["code"])

    def judged(seconds: int) -> list[Incident]:
        with set_clock(T0 + timedelta(seconds=seconds)):
            health_judge()
        return list(Incident.objects.filter(kind="source_silent").exclude(state="closed"))

    with set_clock(T0):
        _, (one, _two) = cards()
        made = source(exporter)
    exporter.bodies["/metrics"] = series(one.uuid, util=97)
    assert heard(0) == "ok" and judged(30) == []
    exporter.status = 503
    assert heard(60) == "refused"
    exporter.status, exporter.bodies["/metrics"] = 200, "# HELP nothing\n"
    assert heard(300) == "empty" and judged(360) == [], "a few fetches may fail"
    [found] = judged(361)
    assert judged(500) == [found] and found.occurrences == 1
    assert (found.severity, found.subject_uid, found.subject_label) == ("warning", made.uid, "dcgm")
    assert found.facts == {
        "cluster": made.cluster.name,
        "fetch": "empty",
        "since": (T0 + timedelta(seconds=60)).isoformat(),
        "good_at": T0.isoformat(),
    }
    exporter.bodies["/metrics"] = series(one.uuid, util=97)
    assert heard(600) == "ok" and judged(601) == []
    found.refresh_from_db()
    assert (found.state, found.note) == ("closed", "no longer seen")
    # Nobody fetches it any more (no worker): also silence; switched off: none
    assert judged(900) == []
    [second] = judged(901)
    assert second.facts["since"] == (T0 + timedelta(seconds=600)).isoformat()
    with set_clock(T0 + timedelta(seconds=910)):
        source_save(acting_user=SYSTEM, cluster=made.cluster, values={"active": False}, source=made)
    assert judged(911) == []


def test_a_source_that_is_switched_on_again_is_not_judged_by_what_was_heard_before(
    exporter: Exporter,
) -> None:
    def switched(on: bool, seconds: int) -> None:
        with set_clock(T0 + timedelta(seconds=seconds)):
            row = MetricSource.objects.get()
            source_save(acting_user=SYSTEM, cluster=row.cluster, values={"active": on}, source=row)

    with set_clock(T0):
        cards()
        made = source(exporter)
        assert source_scrape(source_id=made.pk)["code"] == "refused"
    switched(False, 10)
    switched(True, 86_400)
    with set_clock(T0 + timedelta(seconds=86_405)):
        health_judge()
        assert not Incident.objects.filter(kind="source_silent").exists()
        source_scrape(source_id=made.pk)
    with set_clock(T0 + timedelta(seconds=86_700)):
        assert silent_since(MetricSource.objects.get()) is None
        source_scrape(source_id=made.pk)
    with set_clock(T0 + timedelta(seconds=86_706)):
        assert silent_since(MetricSource.objects.get()) == T0 + timedelta(seconds=86_405)
