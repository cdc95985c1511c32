"""A node without a network for an hour, and hours and days without data: what was kept comes whole, in order and once;
what nobody saw is a hole, never a zero."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from monitoring.models import GpuRollup, GpuSample, GpuState
from monitoring.selectors import series
from monitoring.services import ingest, intake
from monitoring.services.rollups import rollup_run
from pool.agent.outbox import SEGMENT_BYTES, Outbox
from pool.models import Gpu, Node
from portal.accounts.models import User
from portal.kernel.clock import set_clock
from tests.monitoring import builders as b

pytestmark = pytest.mark.django_db
START = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)
STEP = timedelta(seconds=10)
HOUR = 360  # samples


def spooled(folder: Path, card: Gpu, *, limit: int, padding: int = 0) -> Outbox:
    """What an agent kept on its disk in an hour without a network; `padding` makes messages as large as busy nodes'."""
    box = Outbox(str(folder), max_sample_bytes=limit)
    for n in range(HOUR):
        message = b.message(b.row(card, START + n * STEP, util=n % 100))
        box.put({**message, "t": "samples", "padding": "x" * padding})
    return box


def deliver(node: Node, box: Outbox, *, most: int | None = None, acknowledge: bool = True) -> list[int]:
    """The connection of an agent as long as it lasts: what is in flight is stored, then acknowledged. New rows by
    message."""
    new = []
    while (text := box.next()) is not None and (most is None or len(new) < most):
        message = json.loads(text)
        batch, refused = intake.batch_of(node_id=node.pk, message=message)
        assert not refused
        new.append(ingest.samples_write(batches=[batch], tell=False))
        if acknowledge:
            box.acknowledge(message["seq"])
    return new


def hour_of(viewer: User, card: Gpu) -> list[dict[str, Any]]:
    client = Client()
    client.force_login(viewer, backend="django.contrib.auth.backends.ModelBackend")
    query = {"step": "60", "from": START.isoformat(), "to": (START + timedelta(hours=1)).isoformat()}
    answer = client.get(f"/api/v1/gpus/{card.uid}/history/", query)
    assert answer.status_code == 200, answer.content
    points: list[dict[str, Any]] = answer.json()["points"]
    return points


def test_an_hour_without_a_network_comes_whole_in_order_and_once(tmp_path: Path) -> None:
    viewer = b.person("viewer", where=b.department())
    node = b.node("cut-01", 1)
    card = node.gpus.get()
    with set_clock(START + timedelta(hours=1)):
        box = spooled(tmp_path, card, limit=64 << 20)
        assert box.samples.dropped == 0
        # The first connection breaks after forty messages were stored whose acknowledgements never arrived …
        assert deliver(node, box, most=40, acknowledge=False) == [1] * 40
        box.close()
        # … and the agent itself is started anew before the second one
        box = Outbox(str(tmp_path), max_sample_bytes=64 << 20)
        assert deliver(node, box) == [0] * 40 + [1] * (HOUR - 40), "the same again is nothing new"
        assert box.samples.waiting == 0 and box.next() is None
        assert GpuSample.objects.filter(gpu_id=card.pk).count() == HOUR
        assert GpuState.objects.get(gpu=card).at == START + (HOUR - 1) * STEP
        rollup_run(force=True)
        hour = GpuRollup.objects.get(gpu_id=card.pk, step=3600)
        assert (hour.bucket, hour.samples, hour.covered_s) == (START, HOUR, 3600)
        assert hour.util_sum == sum(10 * (n % 100) for n in range(HOUR))
        points = hour_of(viewer, card)
        assert [(p["samples"], p["coverage"]) for p in points] == [(6, 1.0)] * 60, "the hour is shown whole"


def test_a_spool_that_was_too_small_loses_the_oldest_which_is_a_hole_and_counted(tmp_path: Path) -> None:
    viewer = b.person("viewer", where=b.department())
    node = b.node("cut-01", 1)
    card = node.gpus.get()
    with set_clock(START + timedelta(hours=1)):
        box = spooled(tmp_path, card, limit=2 * SEGMENT_BYTES, padding=2_000)
        lost = box.samples.dropped
        assert 0 < lost < HOUR and box.samples.size <= 2 * SEGMENT_BYTES + 4_096
        assert deliver(node, box) == [1] * (HOUR - lost)
        times = list(GpuSample.objects.filter(gpu_id=card.pk).order_by("at").values_list("at", flat=True))
        assert times == [START + n * STEP for n in range(lost, HOUR)], "the newest, without a hole among them"
        rollup_run(force=True)
        points = hour_of(viewer, card)
        gone = {START + timedelta(minutes=m) for m in range(lost // 6)}
        told = {datetime.fromisoformat(p["at"]): p for p in points}
        for minute in gone:
            assert minute not in told or told[minute]["busy_percent"] is None
        assert all(p["busy_percent"] is not None for at, p in told.items() if at not in gone)


@pytest.mark.parametrize(("first_day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-06-16", 24)])
def test_a_day_without_data_is_a_hole_between_days_that_have_all_their_hours(
    first_day: str, hours: int
) -> None:
    """In Berlin's zone, around a change of the clocks: the day of the change has 23 or 25 hours and none is doubled."""
    from zoneinfo import ZoneInfo

    zone = ZoneInfo("Europe/Berlin")
    day = datetime.fromisoformat(first_day).replace(tzinfo=zone)
    after = (day.replace(tzinfo=None) + timedelta(days=1)).replace(tzinfo=zone)
    length = (after.astimezone(UTC) - day.astimezone(UTC)) // timedelta(hours=1)
    assert length == hours
    viewer = b.person("viewer", where=b.department())
    User.objects.filter(pk=viewer.pk).update(time_zone="Europe/Berlin")
    card = b.node("dst-01", 1).gpus.get()
    begin = day.astimezone(UTC)
    # the whole day has data, the next one none, the one after it has again
    wanted = [begin + timedelta(hours=h) for h in range(length)]
    wanted += [begin + timedelta(hours=length + 24 + h) for h in range(3)]
    GpuRollup.objects.bulk_create(
        GpuRollup(gpu_id=card.pk, slot=0, step=3600, bucket=at, samples=360, covered_s=3600, util_n=360,
                  util_sum=360 * 500, util_max=500)
        for at in wanted
    )  # fmt: skip
    with set_clock(wanted[-1] + timedelta(hours=1)):
        client = Client()
        client.force_login(viewer, backend="django.contrib.auth.backends.ModelBackend")
        figure = client.get(reverse("monitoring:gpu-history", args=[card.uid]), {"span": "7d"}).json()
        sheet = client.get(
            reverse("monitoring:gpu-history-csv", args=[card.uid]), {"span": "7d"}
        ).content.decode()
    trace = figure["data"][1]
    shown = {datetime.fromisoformat(x): y for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert [at for at, y in sorted(shown.items()) if y is not None] == wanted
    assert 0 not in shown.values(), "an hour that nobody saw is no zero"
    gap = begin + timedelta(hours=length + 5)
    before, later = [at for at in sorted(shown) if at < gap][-1], [at for at in sorted(shown) if at > gap][0]
    assert shown.get(gap) is None and (shown[before] is None or shown[later] is None), (
        "the line is broken there"
    )
    rows = [line for line in sheet.splitlines()[1:] if line]
    assert len({line.split(",")[0] + line.split(",")[-1] for line in rows}) == len(rows), (
        "no hour stands there twice"
    )


def test_hours_stand_in_where_minutes_do_not_reach_back() -> None:
    """Minutes are kept for a shorter time than hours: a chart of a day goes on in hours before them, without a hole
    and without counting an hour twice; an hour that nobody saw stays one."""
    viewer = b.person("viewer", where=b.department())
    node = b.node("kept-01", 2)
    cards = list(node.gpus.order_by("index"))
    end = START + timedelta(hours=12)

    def rollup(card: Gpu, at: datetime, step: int, value: int) -> GpuRollup:
        n = step // 10
        return GpuRollup(gpu_id=card.pk, slot=0, step=step, bucket=at, samples=n, covered_s=step, util_n=n,
                         util_sum=n * value, util_max=value)  # fmt: skip

    hours = [h for h in range(24) if h != 3]
    with set_clock(end):
        GpuRollup.objects.bulk_create(
            rollup(card, end - timedelta(hours=24 - h), 3600, 300) for card in cards for h in hours
        )
        since = end - timedelta(minutes=100)
        GpuRollup.objects.bulk_create(
            rollup(cards[0], since + timedelta(minutes=m), 60, 700) for m in range(100)
        )
        client = Client()
        client.force_login(viewer, backend="django.contrib.auth.backends.ModelBackend")
        figure = client.get(reverse("monitoring:gpu-history", args=[cards[0].uid]), {"span": "24h"}).json()
        one = series.span_points([(cards[0].pk, 0)], series.SPANS["24h"])
        both = series.charts(
            [(card.pk, 0) for card in cards], start=end - timedelta(days=1), end=end, step=60, point_s=300
        )
    # The hour in which minutes begin is told by them alone: what it has before them is left out, nothing twice
    told = [end - timedelta(hours=24 - h) for h in hours if h < 22]
    assert [(p.at, p.seconds, p.util) for p in one[:21]] == [(at, 3600, 30.0) for at in told]
    assert [(p.at, p.seconds, p.util) for p in one[21:]] == [
        (since + timedelta(minutes=5 * n), 300, 70.0) for n in range(20)
    ]
    assert both[cards[0].pk, 0] == one and [p.at for p in both[cards[1].pk, 0]] == told
    mean = figure["data"][1]
    assert mean["y"].count(None) == 1, "one hole, and it is where nothing was seen"
    assert mean["x"][mean["y"].index(None)] == (end - timedelta(hours=21)).isoformat().replace("+00:00", "Z")
