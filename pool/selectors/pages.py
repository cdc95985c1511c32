"""What pool's pages and API read. Visibility: everybody sees the hardware; work is seen by its holder, by who
reads its department, and by administrators and auditors."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import (
    Count,
    Exists,
    F,
    IntegerField,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
)
from django.db.models.functions import Coalesce

from pool.models import (
    Allocation,
    AllocationMember,
    Cluster,
    Gpu,
    Lease,
    Node,
    QueueEntry,
    ReclaimCase,
    SchedulerCycle,
    Site,
)
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.ops.models import Incident
from portal.ops.selectors.runs import sweeps_silent_since
from quotas.models import CapacityRequest, FlavourCapacity


def allocations_visible(policy: Policy) -> QuerySet[Allocation]:
    """Allocations that this person may see."""
    return Allocation.objects.filter(policy.reads.q("department_id") | Q(holder=policy.user)).select_related(
        "holder", "department", "flavour", "request"
    )


LISTED = (
    *("uid", "state", "end_reason", "charge_milli", "reserved_at", "expires_at", "ended_at"),
    *("holder__display_name", "holder__username", "department__name", "flavour__name"),
    *("request__uid", "request__purpose"),
)
"""What a line of the list shows: the rows behind it have a hundred columns more."""


def allocations_listed(policy: Policy) -> QuerySet[Allocation]:
    """`allocations_visible` for the list: its columns only, and the nodes' names."""
    members = AllocationMember.objects.select_related("node").only("allocation_id", "node__uid", "node__name")
    return (
        allocations_visible(policy)
        .only(*LISTED)
        .prefetch_related(Prefetch("members", members.order_by("number")))
    )


def allocations_held(user_id: int, limit: int = 12) -> list[Allocation]:
    """One person's open allocations, newest first, with what their cards show: nodes, leases, idleness, open cases."""
    open_cases = ReclaimCase.objects.filter(closed_at=None).order_by("-id")
    leases = Lease.objects.filter(ended_at=None).select_related("gpu", "mig_slice")
    members = AllocationMember.objects.select_related("node").order_by("number")
    return list(
        Allocation.objects.filter(holder_id=user_id)
        .exclude(state=Allocation.State.ENDED)
        .select_related("flavour", "request__flavour", "idle_watch")
        .prefetch_related(
            Prefetch("members", members),
            Prefetch("leases", leases.order_by("member", "gpu__index"), to_attr="held_now"),
            Prefetch("reclaim_cases", open_cases, to_attr="open_cases"),
        )
        .order_by("-id")[:limit]
    )


def queue_of(policy: Policy, request_ids: list[int]) -> list[QueueEntry]:
    """Places in line of these requests, of those that the person may see."""
    seen = Q(request__requester=policy.user) | policy.reads.q("request__department_id")
    queued = QueueEntry.objects.filter(
        request_id__in=request_ids, request__state=CapacityRequest.State.QUEUED
    )
    return list(queued.filter(seen).select_related("request__flavour"))


def allocation_seen(policy: Policy, uid: Any) -> Allocation | None:
    """One allocation with its members, leases and GPUs, or None when there is none to be seen."""
    return (
        allocations_visible(policy)
        .filter(uid=uid)
        .prefetch_related(
            Prefetch(
                "members", AllocationMember.objects.select_related("node__cluster__site").order_by("number")
            ),
            Prefetch(
                "leases",
                Lease.objects.select_related("gpu__node", "mig_slice").order_by("member", "gpu__index"),
            ),
        )
        .first()
    )


def _of_node(rows: QuerySet[Any], what: str = "id") -> Coalesce:
    """Count of `rows` that belong to the outer node (`node_key` names the way to it), 0 where none."""
    counted = rows.order_by().values("node_key").annotate(n=Count(what, distinct=True)).values("n")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)


def nodes_listed() -> QuerySet[Node]:
    """Nodes with the figures of the list: GPUs, those in bad condition, those held (open leases).

    Counted by subqueries over indexes, so that history (closed leases) costs nothing and a page of 50 asks for 50.
    """
    cards = Gpu.objects.filter(node=OuterRef("pk")).exclude(condition=Gpu.Condition.RETIRED)
    cards = cards.annotate(node_key=F("node_id"))
    held = Lease.objects.filter(gpu__node=OuterRef("pk"), ended_at=None).annotate(node_key=F("gpu__node_id"))
    return (
        Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
        .select_related("cluster__site")
        .annotate(
            gpu_total=_of_node(cards),
            gpu_bad=_of_node(cards.exclude(condition=Gpu.Condition.OK)),
            gpu_held=_of_node(held, "gpu_id"),
        )
        .order_by("name")
    )


def node_seen(uid: Any) -> Node | None:
    """One node with its GPUs, slices and open leases."""
    open_leases = Lease.objects.filter(ended_at=None).select_related(
        "allocation__holder", "allocation__department", "allocation__request", "mig_slice"
    )
    gpus = (
        Gpu.objects.exclude(condition=Gpu.Condition.RETIRED)
        .select_related("flavour")
        .prefetch_related(
            Prefetch("leases", open_leases.order_by("id"), to_attr="open_leases"),
            Prefetch("mig_slices", to_attr="slices_all"),
        )
        .order_by("index", "id")
    )
    return (
        Node.objects.select_related("cluster__site")
        .prefetch_related(Prefetch("gpus", gpus), "fabrics", "storages")
        .filter(uid=uid)
        .first()
    )


def pool_figures() -> dict[str, int]:
    """Installed = allocated + free + maintenance + down, in milli-GPU, from per-GPU rows (one query each).

    Down: condition not ok, or node lost or never heard of. Maintenance: node not open, or card cordoned. Held
    capacity counts as allocated wherever it is; what a fraction leaves on a card counts as free.
    """
    counted = Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).exclude(
        node__schedulable=Node.Schedulable.RETIRED
    )
    rows = counted.values_list(
        "id", "condition", "cordoned", "node__health", "node__schedulable", "foreign_use"
    )
    held: dict[int, int] = dict(
        Lease.objects.filter(ended_at=None)
        .values("gpu_id")
        .annotate(c=Sum("charge"))
        .values_list("gpu_id", "c")
    )
    out = {"installed": 0, "allocated": 0, "free": 0, "maintenance": 0, "down": 0, "foreign": 0}
    for gpu_id, condition, cordoned, health, schedulable, foreign in rows:
        used = min(1000, held.get(gpu_id, 0))
        rest = 1000 - used
        out["installed"] += 1000
        out["allocated"] += used
        if condition != Gpu.Condition.OK or health in (Node.Health.LOST, Node.Health.UNKNOWN):
            out["down"] += rest
        elif cordoned or schedulable != Node.Schedulable.OPEN:
            out["maintenance"] += rest
        elif foreign and not used:
            out["foreign"] += rest
        else:
            out["free"] += rest
    return out


def free_by_flavour() -> dict[int, int]:
    """Free milli-GPU per flavour on GPUs that may take work now."""
    out: dict[int, int] = {}
    held = dict(
        Lease.objects.filter(ended_at=None)
        .values("gpu_id")
        .annotate(c=Sum("charge"))
        .values_list("gpu_id", "c")
    )
    for gpu_id, flavour_id in Gpu.objects.filter(
        condition=Gpu.Condition.OK,
        cordoned=False,
        foreign_use=[],
        node__schedulable=Node.Schedulable.OPEN,
        node__health__in=[Node.Health.OK, Node.Health.LATE],
        flavour__isnull=False,
    ).values_list("id", "flavour_id"):
        out[flavour_id] = out.get(flavour_id, 0) + max(0, 1000 - held.get(gpu_id, 0))
    return out


def queue_listed(policy: Policy, limit: int = 20) -> list[QueueEntry]:
    """The first places of the queue, with what each waits for; others' requests keep only their shape."""
    return list(
        QueueEntry.objects.filter(request__state=CapacityRequest.State.QUEUED)
        .select_related("request__requester", "request__department", "request__flavour")
        .order_by("position", "request_id")[:limit]
    )


def operations() -> dict[str, Any]:
    """Everything the operations page opens with, in nine queries. Of a node that needs a look `bad_cards` are those of
    its cards that are not in order."""
    bad_cards = Gpu.objects.exclude(condition__in=[Gpu.Condition.OK, Gpu.Condition.RETIRED])
    incidents = list(Incident.objects.exclude(state="closed").order_by("-opened_at")[:200])
    return {
        "silent_since": sweeps_silent_since(),
        "figures": pool_figures(),
        "nodes_bad": list(
            Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
            .filter(
                ~Q(health__in=[Node.Health.OK, Node.Health.UNKNOWN])
                | ~Q(schedulable=Node.Schedulable.OPEN)
                | Exists(bad_cards.filter(node=OuterRef("pk")))
            )
            .select_related("cluster__site")
            .annotate(
                cards=_count_of(
                    Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).filter(node=OuterRef("pk"))
                ),
                cards_held=_count_of(
                    Gpu.objects.filter(node=OuterRef("pk"), leases__ended_at=None, leases__isnull=False),
                    distinct=True,
                ),
            )
            .prefetch_related(Prefetch("gpus", bad_cards.order_by("index"), to_attr="bad_cards"))
            .order_by("name")[:50]
        ),
        "incidents": incidents[:10],
        "incidents_all": incidents,
        "incidents_open": len(incidents),
        "executors": list(
            Cluster.objects.select_related("site")
            .annotate(
                node_total=Count("nodes", filter=~Q(nodes__schedulable="retired")),
                node_ok=Count("nodes", filter=Q(nodes__health__in=["ok", "late"])),
                node_unknown=Count("nodes", filter=Q(nodes__health="unknown")),
                node_lost=Count("nodes", filter=Q(nodes__health__in=["suspect", "lost"])),
                running=_count_of(_work_on(OuterRef("pk"), state="running"), distinct=True),
                retrying=_count_of(
                    _work_on(OuterRef("pk"), state="starting", retry_at__isnull=False), distinct=True
                ),
            )
            .order_by("site__position", "name")
        ),
        "nodes": _nodes_by_state(),
        "cycle": _cycle_figures(),
    }


def _count_of(rows: QuerySet[Any], *, distinct: bool = False) -> Coalesce:
    """So many rows, as a column of another query."""
    counted = rows.order_by().annotate(one=Value(1)).values("one").annotate(n=Count("pk", distinct=distinct))
    return Coalesce(Subquery(counted.values("n"), output_field=IntegerField()), 0)


def _work_on(cluster: OuterRef, **state: Any) -> QuerySet[Allocation]:
    return Allocation.objects.filter(members__node__cluster=cluster, **state)


def _nodes_by_state() -> dict[str, Any]:
    """How many nodes there are, by health and by what may be placed on them, and how many agents of which version
    are heard."""
    rows = (
        Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
        .values_list("health", "schedulable", "agent_version")
        .annotate(n=Count("pk"))
    )
    health: dict[str, int] = defaultdict(int)
    closed: dict[str, int] = defaultdict(int)
    versions: dict[str, int] = defaultdict(int)
    for state, schedulable, version, count in rows:
        health[state] += count
        if schedulable != Node.Schedulable.OPEN:
            closed[schedulable] += count
        if version and state in (Node.Health.OK, Node.Health.LATE):
            versions[version] += count
    words = [
        *((Node.Health(state).label, health[state]) for state in Node.Health.values if health[state]),
        *(
            (Node.Schedulable(state).label, closed[state])
            for state in Node.Schedulable.values
            if closed[state]
        ),
    ]
    return {
        "total": sum(health.values()),
        "states": words,
        "agents": sum(versions.values()),
        "versions": sorted(versions.items(), key=lambda item: -item[1]),
    }


CYCLE_FIGURES = f"""
SELECT (SELECT count(*) FROM {CapacityRequest._meta.db_table} WHERE state = 'queued'),
       (SELECT count(*) FROM {Allocation._meta.db_table} WHERE state <> 'ended'),
       (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY took_ms) FROM {SchedulerCycle._meta.db_table}
         WHERE started_at > %s),
       last.started_at, last.placed
  FROM (SELECT 1) AS always
  LEFT JOIN (SELECT started_at, placed FROM {SchedulerCycle._meta.db_table} ORDER BY started_at DESC LIMIT 1) AS last
    ON true
"""


def _cycle_figures() -> dict[str, Any]:
    """How many wait, how much work is open, the last cycle, and the 95th percentile of the last hour's cycles (s; None
    where there was none). One query."""
    with connection.cursor() as cursor:
        cursor.execute(CYCLE_FIGURES, [now() - timedelta(hours=1)])
        waiting, running, p95_ms, last_at, placed = cursor.fetchone()
    p95_s = None if p95_ms is None else p95_ms / 1000
    return {"waiting": waiting, "running": running, "p95_s": p95_s, "last_at": last_at, "placed": placed}


def sites_and_clusters() -> tuple[list[Site], list[Cluster]]:
    """For filters."""
    return list(Site.objects.all()), list(Cluster.objects.select_related("site"))


def capacities() -> list[FlavourCapacity]:
    """Installed and healthy per flavour."""
    return list(
        FlavourCapacity.objects.select_related("flavour").order_by("flavour__position", "flavour__name")
    )
