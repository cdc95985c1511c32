"""Many at once: no card is given twice, no quota is passed, each act happens once. Real threads, real
transactions.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange, NumericRange

from pool.engine.model import WHOLE, Member, Place, Take
from pool.locks import lock_wait_limit
from pool.models import AgentCommand, Allocation, Lease, LeaseSpan
from pool.services import allocations
from pool.services.closing import allocation_finish
from pool.services.cycle import schedule_cycle
from pool.services.execution import allocation_start
from pool.services.expiry import leases_sweep
from pool.services.plan_apply import place_apply
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Conflict
from portal.ops.models import AuditEvent
from quotas.models import CapacityRequest, QuotaUsage, UsageSpan
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who races here waits for locks as long as a busy machine takes: what is judged is what comes after them."""
    for where in ("plan_apply", "plan_batch", "closing", "reclaim"):
        monkeypatch.setattr(f"pool.services.{where}.lock_wait_limit", lambda: lock_wait_limit(100_000))


def at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Run ``act(i)`` in so many threads that start together; results or exceptions in order."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(index: int) -> None:
        try:
            barrier.wait(timeout=30)
            results[index] = act(index)
        except Exception as error:
            results[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return results


def whole(request: CapacityRequest, node: Any, gpu: Any) -> Place:
    member = Member(0, node.pk, 0, 0, (Take(gpu.pk, (WHOLE,), 1000, 0),))
    return Place(request.pk, request.flavour.code, 1000, 0, (member,), None)


def no_double_booking() -> None:
    charges: Counter[int] = Counter()
    for gpu_id, charge in Lease.objects.filter(ended_at=None).values_list("gpu_id", "charge"):
        charges[gpu_id] += charge
    assert all(charge <= 1000 for charge in charges.values())


def test_twenty_planners_claim_eight_cards():
    """Twenty stale plans at once, each wanting a card that others want too: exactly eight are carried out, and the
    others are refused by a code, never by an error (P053)."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    node = pool.node(h800, 8)
    build.limits(team, h800, 8)
    cards = list(node.gpus.order_by("index"))
    requests = [pool.queued(team, h800, 1) for _ in range(20)]
    places = [whole(request, node, cards[index % 8]) for index, request in enumerate(requests)]
    results = at_once(20, lambda i: place_apply(place=places[i], request=requests[i], flavour_id=h800.pk))
    assert not [one for one in results if isinstance(one, Exception)]
    placed = [one for one in results if one.allocation is not None]
    assert len(placed) == 8
    assert {one.refusal for one in results if one.allocation is None} <= {
        "quota_blocked", "gpu_overcharged", "lease_span_never_twice",
    }  # fmt: skip
    assert sorted(Lease.objects.values_list("gpu_id", flat=True)) == [card.pk for card in cards]
    assert QuotaUsage.objects.get().direct == 8000
    assert UsageSpan.objects.count() == 8
    assert CapacityRequest.objects.filter(state="allocated").count() == 8
    assert CapacityRequest.objects.filter(state="queued").count() == 12
    no_double_booking()


def test_quota_holds_where_cards_would_do():
    """Cards for all, quota for three."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    node = pool.node(h800, 8)
    build.limits(team, h800, 3, hard_cap=3)
    cards = list(node.gpus.order_by("index"))
    requests = [pool.queued(team, h800, 1) for _ in range(8)]
    results = at_once(
        8,
        lambda i: place_apply(
            place=whole(requests[i], node, cards[i]), request=requests[i], flavour_id=h800.pk
        ),
    )
    assert Counter(one.refusal for one in results) == {"": 3, "quota_blocked": 5}
    assert (QuotaUsage.objects.get().direct, Allocation.objects.count(), Lease.objects.count()) == (
        3000,
        3,
        3,
    )


def test_one_request_placed_by_many_is_placed_once():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    node = pool.node(h800, 8)
    build.limits(team, h800, 8)
    cards = list(node.gpus.order_by("index"))
    request = pool.queued(team, h800, 1)
    results = at_once(
        8, lambda i: place_apply(place=whole(request, node, cards[i]), request=request, flavour_id=h800.pk)
    )
    assert sum(one.allocation is not None for one in results) == 1
    assert (QuotaUsage.objects.get().direct, Lease.objects.count(), Allocation.objects.count()) == (
        1000,
        1,
        1,
    )


def test_cycles_at_once_place_each_request_once():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 8)
    build.limits(team, h800, 8)
    for _ in range(12):
        pool.queued(team, h800, 1)
    results = at_once(6, lambda i: schedule_cycle(cause=f"race {i}"))
    assert not [one for one in results if isinstance(one, Exception)]
    assert sum(len(one.placed) for one in results) == 8
    assert AgentCommand.objects.filter(kind="start").count() == 8
    no_double_booking()


def test_the_database_itself_refuses_an_overlap():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 1)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 1)
    schedule_cycle()
    lease = Lease.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic():
        LeaseSpan.objects.create(
            lease=lease, gpu=lease.gpu, span=NumericRange(900, 1000), during=DateTimeTZRange(now(), None)
        )


def test_start_task_delivered_to_many_workers_orders_once():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 8)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 2)
    schedule_cycle()
    pk = Allocation.objects.get().pk
    Allocation.objects.update(state="reserved")
    AgentCommand.objects.all().delete()
    results = at_once(6, lambda i: allocation_start(allocation_id=pk))
    assert AgentCommand.objects.filter(kind="start").count() == 1
    assert all(isinstance(one, bool | IntegrityError) for one in results)


def test_expiry_in_many_workers_stops_once():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 8)
    build.limits(team, h800, 8)
    for _ in range(4):
        pool.queued(team, h800, 1, duration_s=60)
    schedule_cycle()
    later = now() + timedelta(hours=1)

    def sweep(_index: int) -> dict[str, int]:
        with set_clock(later):
            return leases_sweep()

    results = at_once(5, sweep)
    assert sum(one["expired"] for one in results) == 4
    assert AuditEvent.objects.filter(action="allocation.stopped").count() == 4
    assert AgentCommand.objects.filter(kind="stop").count() == 4


def test_release_and_expiry_at_once_one_wins():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 8)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 1, duration_s=60)
    schedule_cycle()
    allocation = Allocation.objects.select_related("holder").get()
    actor = build.actor(allocation.holder)
    later = now() + timedelta(hours=1)

    def act(index: int) -> Any:
        with set_clock(later):
            if index % 2:
                return leases_sweep()["expired"]
            return allocations.allocation_release(acting_user=actor, allocation=allocation)

    results = at_once(6, act)
    won = [one for one in results if isinstance(one, Allocation) or one == 1]
    assert len(won) == 1
    assert all(isinstance(one, Conflict) or one == 0 for one in results if one not in won)
    assert AuditEvent.objects.filter(action="allocation.stopped").count() == 1


def test_closing_in_many_workers_releases_the_quota_once():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 8)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 2)
    pool.queued(team, h800, 2)
    schedule_cycle()
    first = Allocation.objects.order_by("id").first()
    allocations.allocation_release(acting_user=build.actor(first.holder), allocation=first)
    first.members.update(state="free", seen_free_at=now())
    results = at_once(6, lambda i: allocation_finish(allocation_id=first.pk))
    assert sorted(map(str, results)) == ["False"] * 5 + ["True"]
    assert QuotaUsage.objects.get().direct == 2000


def test_claims_and_ends_at_once_never_overbook():
    """Placements race with the ends of what holds the cards; whatever wins, the sums hold."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    pool.node(h800, 4)
    build.limits(team, h800, 4)
    for _ in range(4):
        pool.queued(team, h800, 1)
    schedule_cycle()
    running = list(Allocation.objects.order_by("id"))
    for allocation in running:
        pool.report_running(allocation)
    for _ in range(4):
        pool.queued(team, h800, 1)

    def act(index: int) -> Any:
        if index < 4:
            pool.report_ended(running[index])
            return pool.report_free(running[index])
        return schedule_cycle()

    results = at_once(8, act)
    assert not [one for one in results if isinstance(one, Exception)], results
    schedule_cycle()
    assert Allocation.objects.filter(state="ended").count() == 4
    assert Allocation.objects.exclude(state="ended").count() == 4
    assert QuotaUsage.objects.get().direct == 4000
    no_double_booking()
