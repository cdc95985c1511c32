"""Wrong clocks and agents that lie: what can be true is kept, at the time it was, and the rest has a reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from monitoring.engine.samples import skew_to_take_off
from monitoring.models import GpuSample, GpuState
from monitoring.selectors.identity import identity_forget
from monitoring.services import ingest, intake
from pool.models import Node
from portal.kernel.clock import set_clock
from portal.ops.models import Incident
from tests.monitoring import builders as b

T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)
NOW = 1_800_000_000_000
MINUTE, HOUR = 60_000, 3_600_000


def write(node: Node, *rows: Any) -> tuple[int, dict[str, int]]:
    batch, refused = intake.batch_of(node_id=node.pk, message=b.message(*rows))
    return ingest.samples_write(batches=[batch]), dict(refused)


@pytest.mark.parametrize(
    ("skew", "newest", "off"),
    [
        (0, NOW, 0),
        (4_000, NOW + 4_000, 0),
        (HOUR, NOW + HOUR, HOUR),
        (HOUR + 40, NOW + HOUR, HOUR),
        (-HOUR, NOW - HOUR, -HOUR),
        (HOUR, NOW, 0),
        (-95_000, NOW - 95_000, -100_000),
        (HOUR, NOW - 5 * HOUR, HOUR),
        (HOUR, None, HOUR),
    ],
)
def test_what_is_taken_off_a_wrong_clock(skew: int, newest: int | None, off: int) -> None:
    assert skew_to_take_off(skew, newest, NOW) == off


@pytest.mark.django_db
@pytest.mark.parametrize("ahead", [timedelta(hours=1), -timedelta(hours=2)])
def test_samples_of_a_clock_that_is_wrong_lie_at_their_time_and_a_repeat_adds_nothing(
    ahead: timedelta,
) -> None:
    with set_clock(T0):
        node = b.node("skew-01", 1)
        card = node.gpus.get()
        skew = round(ahead.total_seconds() * 1000)
        Node.objects.filter(pk=node.pk).update(clock_skew_ms=skew + 30)
        rows = [b.row(card, T0 + ahead - timedelta(seconds=s), util=s) for s in (20, 10, 0)]
        assert write(node, *rows) == (3, {})
        Node.objects.filter(pk=node.pk).update(clock_skew_ms=skew - 45)
        identity_forget()
        assert write(node, *rows) == (0, {}), "another greeting took another way; the times are the same"
    assert GpuState.objects.get().at == T0
    assert sorted(GpuSample.objects.values_list("at", flat=True)) == [
        T0 - timedelta(seconds=20),
        T0 - timedelta(seconds=10),
        T0,
    ]


@pytest.mark.django_db
def test_a_clock_that_was_set_right_is_taken_at_its_word() -> None:
    with set_clock(T0):
        node = b.node("skew-01", 1)
        Node.objects.filter(pk=node.pk).update(clock_skew_ms=HOUR)
        assert write(node, b.row(node.gpus.get(), T0)) == (1, {})
    assert GpuState.objects.get().at == T0


@pytest.mark.django_db
def test_an_agent_that_lies_moves_no_figure_of_others_and_none_that_cannot_be() -> None:
    with set_clock(T0):
        liar, honest = b.node("liar-01", 1), b.node("honest-01", 1)
        mine, other = liar.gpus.get(), honest.gpus.get()
        write(honest, b.row(other, T0 - timedelta(seconds=5), util=30))
        rows = [
            b.row(mine, T0, util=250, mem_used=17_000_000, power_mw=-3, temp=61),
            b.row(other, T0, util=99),
            b.row(mine, datetime(2038, 1, 19, 3, 14, 7, tzinfo=UTC), util=99),
            b.row("GPU-ffffffff-0000-4000-8000-000000000000", T0, util=99),
        ]
        # The last time in the message is not believed either: nothing here makes the clock look wrong.
        new, refused = write(liar, *rows)
    assert (new, refused) == (1, {"foreign": 1, "future": 1, "unknown": 1})
    state = GpuState.objects.get(gpu=mine)
    assert (state.util_pm, state.mem_used_mib, state.power_mw, state.temp_c) == (None, None, None, 61)
    assert [state.missing[m] for m in ("util", "mem_used", "power_mw")] == ["out_of_range"] * 3
    assert GpuState.objects.get(gpu=other).util_pm == 300
    assert {i.facts["code"] for i in Incident.objects.all()} == {"foreign", "future", "unknown"}
