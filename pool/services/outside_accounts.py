"""An outside system's own accounting against ours: what ran when, by both books. Differences are an incident; nothing
is mended silently.

Ours is what executors reported (the members' starts and ends), which leases and ledger follow. A lease is longer than
its run by design: it begins when cards are reserved and ends when they were seen free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog

from pool.executors.base import ACCOUNTS, Account, ExecutorFailure, polled_executor
from pool.models import Allocation, AllocationMember, Cluster
from portal.kernel.clock import now
from portal.ops.services import incident_open, incident_resolve

log = structlog.get_logger(__name__)
DAY = timedelta(hours=24)
TOLERANCE = timedelta(seconds=60)
MOST_SHOWN = 50


@dataclass
class Comparison:
    """``differences``: {allocation, work, what, ours, theirs} each; ``compared`` runs in all."""

    compared: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)


def accounts_compare(*, cluster: Cluster, since: datetime, until: datetime) -> Comparison:
    """Compare the runs of a time; opens or closes the cluster's incident. Raises the executor's failures."""
    executor = polled_executor(cluster)
    done = Comparison()
    if executor is None or ACCOUNTS not in executor.can:
        return done
    rows = executor.accounts(cluster=cluster, since=since, until=until)
    allocations = {
        row.uid: row
        for row in Allocation.objects.filter(uid__in={account.uid for account in rows}).prefetch_related(
            "members"
        )
    }
    for account in rows:
        allocation = allocations.get(account.uid)
        if allocation is None or account.started_at is None:
            continue  # another installation's, or it never ran
        members = [one for one in allocation.members.all() if one.external_id == account.external_id]
        done.compared += 1
        done.differences += _differences(account, allocation, members)
    key = f"accounts_differ:{cluster.uid}"
    if done.differences:
        incident_open(
            kind="accounts_differ",
            dedupe_key=key,
            subject=cluster,
            facts={"count": len(done.differences), "first": done.differences[:MOST_SHOWN]},
        )
    else:
        incident_resolve(dedupe_key=key, note="The books agree again.")
    return done


def accounts_compare_all() -> int:
    """Compare the last day of every cluster that keeps books; returns how many were asked. One that is away is left
    for the next time."""
    at = now()
    asked = 0
    for cluster in (
        Cluster.objects.exclude(executor=Cluster.Executor.AGENT).filter(away_since=None).order_by("id")
    ):
        try:
            accounts_compare(cluster=cluster, since=at - DAY, until=at)
        except ExecutorFailure as error:
            log.info("accounts_not_compared", cluster=cluster.code, code=error.code)
            continue
        asked += 1
    return asked


def _differences(
    account: Account, allocation: Allocation, members: list[AllocationMember]
) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []

    def differs(what: str, ours: object, theirs: object) -> None:
        out.append(
            {
                "allocation": allocation.ref,
                "work": account.external_id,
                "what": what,
                "ours": str(ours),
                "theirs": str(theirs),
            }
        )

    if not members:
        differs("unknown_here", None, account.started_at)
        return out
    started = min((one.started_at for one in members if one.started_at), default=None)
    ends = [one.ended_at for one in members]
    ended = None if None in ends else max(one for one in ends if one is not None)
    if _apart(started, account.started_at):
        differs("started_at", started, account.started_at)
    if _apart(ended, account.ended_at):
        differs("ended_at", ended, account.ended_at)
    return out


def _apart(ours: datetime | None, theirs: datetime | None) -> bool:
    if ours is None or theirs is None:
        return ours is not theirs
    return abs(ours - theirs) > TOLERANCE
