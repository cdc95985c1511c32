"""What exporters do wrong by public bug reports, from the address to what the scheduler sees."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from monitoring.models import GpuEvent, GpuState, MetricSource
from monitoring.services.scrape import source_scrape
from monitoring.services.sources import source_save
from pool.models import Allocation, Cluster, Gpu
from pool.services.cycle import schedule_cycle
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from portal.ops.models import Incident
from tests.monitoring.sources.server import Exporter, serving
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with serving() as running, set_clock(T0):
        yield running


def one_card() -> Gpu:
    pool.node(build.flavour("h800", installed=None), 1, name="k8s-01")
    Gpu.objects.update(uuid="GPU-00000001-1111-4222-8333-000000000001")
    return Gpu.objects.get()


def source(exporter: Exporter) -> MetricSource:
    values = {"name": "dcgm", "kind": "exporter", "url": exporter.url + "/metrics"}
    return source_save(acting_user=SYSTEM, cluster=Cluster.objects.get(), values=values, secret=None)


def line(name: str, card: Gpu, value: Any, **labels: Any) -> str:
    more = "".join(f',{key}="{word}"' for key, word in labels.items())
    return f'{name}{{gpu="0",UUID="{card.uuid}"{more}}} {value}\n'


def test_g088_no_count_of_errors_is_no_error_and_no_failure(exporter: Exporter) -> None:
    """Without an error in its window the exporter prints no count at all."""
    card, made = one_card(), source(exporter)
    counted = line("DCGM_EXP_XID_ERRORS_COUNT", card, 1, xid="43", window_size_in_ms="300000")
    codes = []
    for second, more in ((0, ""), (15, counted), (30, "")):
        exporter.bodies["/metrics"] = line("DCGM_FI_DEV_GPU_UTIL", card, 5) + more
        with set_clock(T0 + timedelta(seconds=second)):
            codes.append(source_scrape(source_id=made.pk)["code"])
    assert codes == ["ok"] * 3
    assert list(GpuEvent.objects.values_list("code", flat=True)) == [43], "its going away is no news"
    assert "xid" not in GpuState.objects.get(gpu=card).missing
    assert not Incident.objects.filter(kind="source_silent").exists()


def test_g096_an_old_code_that_stands_in_the_gauge_is_one_event_until_the_driver_is_loaded_anew(
    exporter: Exporter,
) -> None:
    card, made = one_card(), source(exporter)

    def fetch(second: int, gauge: int) -> list[int]:
        exporter.bodies["/metrics"] = line("DCGM_FI_DEV_XID_ERRORS", card, gauge)
        with set_clock(T0 + timedelta(seconds=second)):
            source_scrape(source_id=made.pk)
        return list(GpuEvent.objects.order_by("id").values_list("code", flat=True))

    assert fetch(0, 0) == [] and fetch(15, 94) == [94]
    for hour in range(1, 25):
        assert fetch(hour * 3600, 94) == [94], "a value that stays says nothing new"
    assert fetch(90_000, 0) == [94], "a value that goes takes nothing back"
    assert fetch(90_015, 94) == [94, 94]


def test_g092_an_exporter_that_crashes_takes_no_card_out_of_the_pool(exporter: Exporter) -> None:
    """Telemetry is away while the GPUs work: what may be placed does not depend on it."""
    card, made = one_card(), source(exporter)
    exporter.bodies["/metrics"] = line("DCGM_FI_DEV_GPU_UTIL", card, 5)
    source_scrape(source_id=made.pk)
    team = build.department("vg")
    build.limits(team, card.flavour, 1)  # type: ignore[arg-type]
    exporter.status = 500
    with set_clock(T0 + timedelta(minutes=10)):
        card.node.__class__.objects.update(last_heartbeat_at=T0 + timedelta(minutes=10))
        assert source_scrape(source_id=made.pk)["code"] == "refused"
        request = pool.queued(team, card.flavour, 1)
        schedule_cycle()
    assert Allocation.objects.get(request=request).leases.get().gpu_id == card.pk
    card.refresh_from_db()
    assert (card.condition, card.node.health) == ("ok", "ok")
    assert GpuState.objects.get(gpu=card).at == T0, "and what is shown is as old as it is"
