"""Ingest: durable, idempotent, late data, foreign cards."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from monitoring.live.ingest_sink import samples_sink
from monitoring.models import GpuRollup, GpuSample, GpuState, NodeState, RollupDue
from monitoring.services import ingest, intake
from monitoring.services.partitions import partitions_ensure, partitions_existing, partitions_keep
from monitoring.services.rollups import rollup_run
from portal.kernel.clock import now, set_clock
from portal.ops.models import Incident
from tests.monitoring import builders as b

T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)


def write(node, *rows, **more):
    batch, refused = intake.batch_of(node_id=node.pk, message=b.message(*rows, **more))
    return ingest.samples_write(batches=[batch]), dict(refused)


@pytest.mark.django_db
def test_exact_values_in_raw_and_state() -> None:
    with set_clock(T0):
        node = b.node()
        card = node.gpus.get(index=0)
        new, refused = write(
            node, b.row(card, T0, util=93, temp=66), host={"cpu": 41.5, "iowait": 3, "mem_used_mib": 9}
        )
    assert (new, refused) == (1, {})
    raw = GpuSample.objects.get()
    assert (raw.gpu_id, raw.slot, raw.at, raw.util_pm, raw.sm_pm) == (card.pk, 0, T0, 930, None)
    assert (raw.mem_used_mib, raw.mem_total_mib, raw.temp_c, raw.power_mw) == (73728, 81559, 66, 621_000)
    state = GpuState.objects.get()
    assert (state.at, state.util_pm, state.mem_reserved_mib, state.quiet_since) == (T0, 930, 600, None)
    assert state.missing["sm"] == "not_supported"
    assert state.processes == [{"pid": 4711, "name": "python", "user": "wutao", "mem_mib": 72000}]
    host = NodeState.objects.get()
    assert (host.cpu_pm, host.iowait_pm, host.mem_used_mib) == (415, 30, 9)


@pytest.mark.django_db
def test_a_repeated_batch_changes_nothing() -> None:
    with set_clock(T0):
        node = b.node()
        rows = [b.row(card, T0 - timedelta(seconds=s), util=s) for card in node.gpus.all() for s in range(5)]
        assert write(node, *rows)[0] == 10
        due = RollupDue.objects.count()
        assert write(node, *rows)[0] == 0
        assert write(node, *rows, *rows)[0] == 0
        assert GpuSample.objects.count() == 10 and GpuState.objects.count() == 2
        assert RollupDue.objects.count() == due
        assert {s.util_pm for s in GpuState.objects.all()} == {0}


@pytest.mark.django_db
def test_the_newest_state_wins_and_late_data_never_turns_it_back() -> None:
    with set_clock(T0):
        node = b.node(gpus=1)
        card = node.gpus.get()
        write(node, b.row(card, T0, util=80))
        write(node, b.row(card, T0 - timedelta(minutes=3), util=10))
        assert GpuState.objects.get().util_pm == 800
        assert GpuSample.objects.count() == 2


@pytest.mark.django_db
def test_late_data_corrects_minute_hour_and_day() -> None:
    start = T0.replace(minute=0, second=0)
    with set_clock(T0 + timedelta(hours=1)):
        node = b.node(gpus=1)
        card = node.gpus.get()
        write(node, *[b.row(card, start + timedelta(seconds=10 * i), util=50) for i in range(6)])
        rollup_run(force=True)
        minute = GpuRollup.objects.get(step=60)
        assert (minute.samples, minute.util_n, minute.util_sum, minute.util_max, minute.covered_s) == (
            6,
            6,
            3000,
            500,
            60,
        )
        write(
            node,
            *[b.row(card, start + timedelta(seconds=60 + 10 * i), util=100, temp=None) for i in range(3)],
        )
        rollup_run(force=True)
        hour, day = GpuRollup.objects.get(step=3600), GpuRollup.objects.get(step=86400)
        for bucket in (hour, day):
            assert (bucket.samples, bucket.util_n, bucket.util_sum, bucket.util_max) == (9, 9, 6000, 1000)
            assert (bucket.temp_n, bucket.temp_sum, bucket.sm_n, bucket.covered_s) == (6, 396, 0, 90)
        assert hour.bucket == start and day.bucket == start.replace(hour=0)
        assert not RollupDue.objects.exists()
        assert rollup_run(force=True) == {60: 0, 3600: 0, 86400: 0}


@pytest.mark.django_db
def test_open_hours_are_refreshed_every_five_minutes_closed_ones_at_once() -> None:
    with set_clock(T0.replace(minute=3)):
        node = b.node(gpus=1)
        write(node, b.row(node.gpus.get(), T0), b.row(node.gpus.get(), T0 - timedelta(hours=1)))
        rollup_run()
        assert list(GpuRollup.objects.filter(step=3600).values_list("bucket__hour", flat=True)) == [5]
    with set_clock(T0.replace(minute=5, second=20)):
        rollup_run()
        assert GpuRollup.objects.filter(step=3600).count() == 2


@pytest.mark.django_db
def test_foreign_and_unknown_cards_are_refused_and_told_p21() -> None:
    with set_clock(T0):
        mine, other = b.node("a-01", 1), b.node("b-01", 1)
        rows = [b.row(mine.gpus.get(), T0), b.row(other.gpus.get(), T0), b.row("GPU-00000000-dead", T0)]
        new, refused = write(mine, *rows)
        assert new == 1 and refused == {"foreign": 1, "unknown": 1}
        assert list(GpuSample.objects.values_list("gpu_id", flat=True)) == [mine.gpus.get().pk]
        kinds = set(Incident.objects.values_list("dedupe_key", flat=True))
        assert kinds == {f"telemetry_refused:{mine.pk}:foreign", f"telemetry_refused:{mine.pk}:unknown"}
        write(mine, *rows)
        assert Incident.objects.count() == 2 and set(
            Incident.objects.values_list("occurrences", flat=True)
        ) == {1}


@pytest.mark.django_db
def test_time_from_2038_is_refused_and_the_others_are_kept() -> None:
    with set_clock(T0):
        node = b.node(gpus=1)
        bad = b.row(node.gpus.get(), T0)
        bad[2] = "2038-01-19T03:14:07Z"
        assert write(node, bad, b.row(node.gpus.get(), T0)) == (1, {"future": 1})


@pytest.mark.django_db
def test_mig_slices_have_rows_of_their_own_p22() -> None:
    with set_clock(T0):
        node = b.node(gpus=1)
        card = node.gpus.get()
        part = b.slice_of(card, 0, 0, 4)
        assert (
            write(
                node,
                b.row(card, T0, util=None, missing={"util": "not_supported"}),
                b.row(card, T0, mig=part.uuid),
            )[0]
            == 2
        )
        assert sorted(GpuSample.objects.values_list("slot", "temp_c")) == [(0, 66), (1, None)]


@pytest.mark.django_db
def test_quiet_since_needs_an_unbroken_run() -> None:
    with set_clock(T0):
        node = b.node(gpus=1)
        card = node.gpus.get()
        at = [T0 - timedelta(seconds=60 - 10 * i) for i in range(7)]
        write(node, b.row(card, at[0], util=0, procs=[]), b.row(card, at[1], util=0, procs=[]))
        assert GpuState.objects.get().quiet_since == at[0]
        write(node, b.row(card, at[2], util=0, procs=[]))
        assert GpuState.objects.get().quiet_since == at[0]
        write(node, b.row(card, at[3], util=80), b.row(card, at[4], util=0, procs=[]))
        assert GpuState.objects.get().quiet_since == at[4]
        write(node, b.row(card, at[5], util=None))
        assert GpuState.objects.get().quiet_since is None


@pytest.mark.django_db
def test_a_hole_of_data_ends_the_quiet_run() -> None:
    with set_clock(T0):
        node = b.node(gpus=1)
        card = node.gpus.get()
        write(node, b.row(card, T0 - timedelta(minutes=20), util=0, procs=[]))
        write(node, b.row(card, T0, util=0, procs=[]))
        assert GpuState.objects.get().quiet_since == T0


@pytest.mark.django_db
def test_partitions_are_made_ahead_and_dropped_by_retention() -> None:
    with set_clock(T0):
        partitions_ensure(days=[(T0 - timedelta(days=30)).date()])
        result = partitions_keep()
        days = set(partitions_existing().values())
        assert (T0 + timedelta(days=3)).date() in days and T0.date() in days
        assert (T0 - timedelta(days=30)).date() not in days
        assert f"monitoring_gpusample_{T0 - timedelta(days=30):%Y%m%d}" in result["dropped"]
        assert partitions_keep() == {"made": [], "dropped": []}


@pytest.mark.django_db
def test_hours_of_a_clock_change_are_utc_hours_and_never_doubled() -> None:
    """25 October 2026, 03:00 → 02:00 in Berlin: instants are UTC, so there are 24 distinct hours."""
    midnight = datetime(2026, 10, 25, tzinfo=UTC)
    with set_clock(midnight + timedelta(hours=26)):
        node = b.node(gpus=1)
        card = node.gpus.get()
        write(node, *[b.row(card, midnight + timedelta(hours=h), util=10) for h in range(24)])
        rollup_run(force=True)
        assert GpuRollup.objects.filter(step=3600).count() == 24
        assert GpuRollup.objects.get(step=86400).samples == 24


async def test_the_sink_returns_when_durable_and_groups_batches(committed: None) -> None:
    node = await sync_to_async(b.node)("sink-01", 4)
    cards = await sync_to_async(lambda: list(node.gpus.all()))()
    at = now()
    jobs = [
        samples_sink(node.pk, b.message(b.row(card, at - timedelta(seconds=s))))
        for card in cards
        for s in range(5)
    ]
    started = asyncio.get_running_loop().time()
    assert await asyncio.gather(*jobs) == [{}] * 20
    assert asyncio.get_running_loop().time() - started < 5

    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM monitoring_gpusample")
            return cursor.fetchone()[0]

    assert await sync_to_async(count)() == 20
    assert await samples_sink(node.pk, b.message(b.row("GPU-unknown", at))) == {"unknown": 1}


@pytest.mark.django_db
def test_a_node_that_was_just_enrolled_loses_no_sample() -> None:
    with set_clock(T0):
        old = b.node("old-01", 1)
        write(old, b.row(old.gpus.get(), T0))  # the pool is cached now
        fresh = b.node("fresh-01", 1)
        assert write(fresh, b.row(fresh.gpus.get(), T0)) == (1, {})
        card = old.gpus.get()
        part = b.slice_of(card, 3, 0, 4)
        assert write(old, b.row(card, T0, mig=part.uuid)) == (1, {})


@pytest.mark.django_db
@pytest.mark.parametrize("ahead", [0, 3600])
def test_of_a_long_backlog_the_last_state_is_whole_whatever_its_order(ahead: int) -> None:
    """Earlier rows of a card are read without what only the last state keeps; a last row that is refused hides none."""
    with set_clock(T0):
        node = b.node()
        times = [T0 - timedelta(seconds=10 * n) for n in range(40)]  # the newest comes first
        rows = [
            b.row(card, at, mem_clock=2619, util=n) for n, at in enumerate(times) for card in node.gpus.all()
        ]
        if ahead:
            rows.append(b.row(node.gpus.first(), T0 + timedelta(seconds=ahead), mem_clock=1))
        new, refused = write(node, *rows)
    assert (new, refused) == (80, {"future": 1} if ahead else {})
    for state in GpuState.objects.all():
        assert (state.at, state.util_pm, state.more, len(state.processes)) == (T0, 0, {"mem_clock": 2619}, 1)
    assert GpuState.objects.count() == 2
    assert list(
        GpuSample.objects.filter(gpu_id=node.gpus.first().pk)
        .order_by("-at")
        .values_list("util_pm", flat=True)
    ) == [10 * n for n in range(40)]
