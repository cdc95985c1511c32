"""Rollups in partitions, sums over the fleet, days without data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from monitoring.models import FleetRollup, GpuRollup
from monitoring.selectors.fleet_series import fleet_history
from monitoring.selectors.series import history
from monitoring.services import ingest, intake
from monitoring.services.partitions import rollup_partitions_drop, rollup_partitions_ensure
from monitoring.services.rollups import rollup_run, rollups_keep
from pool.models import Gpu
from portal.kernel.clock import set_clock
from tests.monitoring import builders as b
from tests.portal.builders import bearer, token_of

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def write(*rows: Any) -> None:
    node = Gpu.objects.get(uuid=rows[0][0]).node
    batch, refused = intake.batch_of(node_id=node.pk, message=b.message(*rows))
    assert not refused
    ingest.samples_write(batches=[batch])


def tables(step: int) -> dict[str, int]:
    """Rows by table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tableoid::regclass::text, count(*) FROM monitoring_gpurollup WHERE step = %s GROUP BY 1",
            [step],
        )
        return dict(cursor.fetchall())


def test_minutes_lie_by_day_hours_by_month_days_in_one() -> None:
    with set_clock(T0 + DAY):
        card = b.node(gpus=1).gpus.get()
        write(*[b.row(card, T0 + n * HOUR, util=40) for n in range(3)], b.row(card, T0 + 20 * HOUR, util=80))
        rollup_run(force=True)
    assert tables(60) == {"monitoring_gpurollup_60_20260616": 3, "monitoring_gpurollup_60_20260617": 1}
    assert tables(3600) == {"monitoring_gpurollup_3600_202606": 4}
    assert tables(86400) == {"monitoring_gpurollup_86400": 2}


def test_rows_that_were_written_before_their_partition_move_into_it() -> None:
    card = b.node(gpus=1).gpus.get()
    for hour in (T0, T0 + HOUR, T0 + 40 * DAY):
        GpuRollup.objects.create(
            gpu_id=card.pk, slot=0, step=3600, bucket=hour, samples=6, util_n=6, util_sum=60
        )
    assert tables(3600) == {"monitoring_gpurollup_3600_rest": 3}
    rollup_partitions_ensure(step=3600, buckets=[T0])
    rollup_partitions_ensure(step=3600, buckets=[T0 + HOUR])
    assert tables(3600) == {"monitoring_gpurollup_3600_202606": 2, "monitoring_gpurollup_3600_rest": 1}
    assert GpuRollup.objects.filter(util_sum=60).count() == 3


def test_retention_drops_whole_partitions_and_keeps_days() -> None:
    card = b.node(gpus=1).gpus.get()
    with set_clock(T0):
        for step, bucket in (
            (60, T0 - 40 * DAY),
            (60, T0 - DAY),
            (3600, T0 - 500 * DAY),
            (3600, T0 - 100 * DAY),
            (86400, T0 - 900 * DAY),
        ):
            rollup_partitions_ensure(step=step, buckets=[bucket])
            GpuRollup.objects.create(gpu_id=card.pk, slot=0, step=step, bucket=bucket, samples=1)
        GpuRollup.objects.create(gpu_id=card.pk, slot=0, step=60, bucket=T0 - 60 * DAY, samples=1)
        dropped = rollups_keep()
        assert dropped == ["monitoring_gpurollup_60_20260507", "monitoring_gpurollup_3600_202502"]
        assert rollups_keep() == []
    left = set(GpuRollup.objects.values_list("step", "bucket"))
    assert left == {(60, T0 - DAY), (3600, T0 - 100 * DAY), (86400, T0 - 900 * DAY)}
    assert rollup_partitions_drop(step=60, before=T0 - 30 * DAY) == []


def test_the_sums_of_the_fleet_are_those_of_its_cards_and_slices_count_once() -> None:
    with set_clock(T0 + 2 * HOUR):
        one, two = b.node("a-01", 2, site="shanghai"), b.node("b-01", 1, site="beijing")
        first, second = one.gpus.order_by("index")
        third = two.gpus.get()
        part = b.slice_of(second, 1, 0, 4)
        write(
            b.row(first, T0, util=90, power_mw=600_000),
            b.row(second, T0, util=None, missing={"util": "not_measurable"}),
        )
        write(b.row(second, T0, mig=part.uuid, util=50))
        write(*[b.row(third, T0 + timedelta(seconds=10 * n), util=10) for n in range(2)])
        rollup_run(force=True)
    (point,) = fleet_history(start=T0, end=T0 + HOUR, step=3600)
    assert (point.at, point.cards, point.util) == (T0, 3, round((90 + 10 + 10) / 3, 2))
    assert point.coverage == (10 + 10 + 20) / (3 * 3600) and point.sm is None
    (beijing,) = fleet_history(start=T0, end=T0 + DAY, step=86400 // 24, clusters=[two.cluster_id])
    assert (beijing.cards, beijing.util, beijing.power_w) == (1, 10.0, 621.0)
    assert fleet_history(start=T0, end=T0 + DAY, step=3600, flavours=[]) == []
    assert FleetRollup.objects.filter(step=86400).count() == 2


def test_late_data_mends_the_sums_of_the_fleet() -> None:
    with set_clock(T0 + 2 * HOUR):
        card = b.node(gpus=1).gpus.get()
        write(b.row(card, T0, util=100))
        rollup_run(force=True)
        write(b.row(card, T0 + timedelta(minutes=10), util=0))
        rollup_run(force=True)
    (row,) = FleetRollup.objects.filter(step=3600)
    assert (row.cards, row.util_n, row.util_sum) == (1, 2, 1000)


def test_a_day_without_data_is_a_hole_and_no_zero() -> None:
    with set_clock(T0 + 3 * DAY):
        card = b.node(gpus=1).gpus.get()
        write(b.row(card, T0, util=50), b.row(card, T0 + 2 * DAY, util=70))
        rollup_run(force=True)
        start = T0.replace(hour=0)
        days = history([(card.pk, 0)], start=start, end=start + 3 * DAY, step=86400, point_s=86400)
        whole = fleet_history(start=start, end=start + 3 * DAY, step=86400)
    assert [(p.at, p.util) for p in days] == [(start, 50.0), (start + 2 * DAY, 70.0)]
    assert [p.at for p in whole] == [start, start + 2 * DAY]
    assert days[0].coverage == 10 / 86400


@pytest.mark.parametrize(
    ("day", "hours"), [(datetime(2026, 3, 29, tzinfo=UTC), 23), (datetime(2026, 10, 25, tzinfo=UTC), 25)]
)
def test_a_local_day_of_a_clock_change_has_its_hours(day: datetime, hours: int) -> None:
    """29 March and 25 October in Berlin: buckets are instants, so the local day adds up from 23 or 25 of them."""
    from zoneinfo import ZoneInfo

    zone = ZoneInfo("Europe/Berlin")
    start = datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)
    end = (datetime(day.year, day.month, day.day, tzinfo=zone) + DAY).astimezone(UTC)
    with set_clock(end + HOUR):
        card = b.node(gpus=1).gpus.get()
        write(
            *[b.row(card, start + n * HOUR, util=10) for n in range(-2, 27) if start + n * HOUR <= end + HOUR]
        )
        rollup_run(force=True)
        points = history([(card.pk, 0)], start=start, end=end, step=3600, point_s=3600)
    assert len(points) == hours == len({p.at for p in points})


def test_the_history_of_the_pool_by_the_api() -> None:
    with set_clock(T0 + 2 * HOUR):
        card = b.node("a-01", 1).gpus.get()
        write(b.row(card, T0, util=64, temp=60))
        rollup_run(force=True)
        path = "/api/v1/telemetry/history/"
        user = b.person("reader", "auditor")
        head = bearer(token_of(user, "read"))
        found = Client().get(path, {"cluster": card.node.cluster.code}, **head)
        assert found.status_code == 200, found.content
        (point,) = found.json()["points"]
        assert (point["at"], point["cards"], point["busy_percent"], point["sm_activity_percent"]) == (
            T0.isoformat(),
            1,
            64.0,
            None,
        )
        assert Client().get(path, {"flavour": "nobodys"}, **head).json()["points"] == []
        for bad in (
            {"step": "60"},
            {"step": "x"},
            {"from": "yesterday"},
            {"site": "x"},
            {"from": "2020-01-01T00:00:00Z"},
        ):
            assert Client().get(path, bad, **head).status_code == 400, bad
        assert Client().get(path).status_code == 401
