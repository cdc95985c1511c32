"""How many claims a second the real path decides under contention, and that nothing is ever over-allocated.

Rounds of `THREADS` threads, released by a barrier, all place their own queued request on the same card through
`place_apply` (quota debit, locks, leases, ledger span, audit, outbox). A round has one winner per card; the
others are refused by the lock's re-check or by the exclusion constraint. After each round the winners are closed.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.perf._database import fresh_database

THREADS = 20
CARDS = 8
ROUNDS = 12


def _claim(place: Any, request: Any, flavour_id: int, barrier: threading.Barrier, out: list[str]) -> None:
    from django.db import connection

    from pool.services.plan_apply import place_apply

    barrier.wait()
    applied = place_apply(place=place, request=request, flavour_id=flavour_id)
    out.append("won" if applied.allocation is not None else applied.refusal)
    connection.close()


def run() -> dict[str, Any]:
    """Claims per second over all rounds (won and refused), winners, and the worst over-allocation seen (aim 0)."""
    with fresh_database():
        return _measure()


def _measure() -> dict[str, Any]:
    import structlog
    from django.db.models import Sum

    from pool.engine.model import Member, Place, Take
    from pool.models import Gpu, Lease
    from tests.pool import builders as pool
    from tests.quotas import build

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    flavour = build.flavour("h800", installed=None)
    team = build.department("team")
    node = pool.node(flavour, gpus=CARDS)
    build.limits(team, flavour, CARDS * ROUNDS, hard_cap=CARDS * ROUNDS)
    cards = list(Gpu.objects.order_by("id").values_list("id", flat=True))
    spent = 0.0
    results: list[str] = []
    over = 0
    for turn in range(ROUNDS):
        barrier = threading.Barrier(THREADS)
        out: list[str] = []
        threads = []
        for number in range(THREADS):
            request = pool.queued(team, flavour, 1)
            card = cards[(turn + number) % CARDS]
            take = Take(gpu_id=card, spans=((0, 1000),), charge_milli=1000, memory_mib=0)
            member = Member(number=0, node_id=node.pk, cpu_milli=1000, memory_mib=1024, takes=(take,))
            place = Place(request.pk, flavour.code, 1000, 0, (member,), None)
            threads.append(threading.Thread(target=_claim, args=(place, request, flavour.pk, barrier, out)))
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent += time.perf_counter() - began
        results += out
        held = Lease.objects.filter(ended_at=None).values("gpu_id").annotate(charge=Sum("charge"))
        over = max(over, *(max(0, row["charge"] - 1000) for row in held), len(held) - CARDS)
        assert out.count("won") == CARDS, out
        _give_back()
    won = results.count("won")
    return {
        "sizes": {"threads": THREADS, "cards": CARDS, "rounds": ROUNDS, "claims": len(results)},
        "figures": {
            "claims_per_s": round(len(results) / spent, 1),
            "won": won,
            "refused": len(results) - won,
            "over_allocated_milli": over,
        },
        "aims": {"over_allocated_milli": ["<", 1]},
    }


def _give_back() -> None:
    """Close every open allocation by the real way: released, exited, seen free."""
    from pool.models import Allocation
    from pool.services.closing import allocation_finish
    from tests.pool import builders as pool

    for allocation in Allocation.objects.exclude(state="ended"):
        pool.report_running(allocation)
        pool.report_ended(allocation)
        pool.report_free(allocation)
        allocation_finish(allocation_id=allocation.pk)
