"""Quotas as GrpTRES of the departments' accounts."""

from __future__ import annotations

from collections.abc import Iterable

from pool.executors.base import Limit
from pool.executors.slurm.settings import SlurmSettings
from pool.executors.slurm.transport import Association
from pool.models import Cluster, Node
from pool.services.outside_limits import wanted_limits

ALL = "gres/gpu"


def limits_read(cluster: Cluster, there: Iterable[Association], settings: SlurmSettings) -> list[Limit]:
    """One limit an account on all its GPUs together: Slurm counts typed GPUs only where a site asked it to
    (AccountingStorageTRES), the sum it always can. Where several departments share an account their limits add up; one
    without a limit makes the account's none. Accounts that Slurm does not have are left out: the check names them.
    """
    wanted: dict[str, int | None] = {}
    for department, flavours in wanted_limits(cluster=cluster).items():
        account = settings.account_of(department)
        for cards in flavours.values():
            before = wanted.get(account, 0)
            wanted[account] = None if cards is None or before is None else before + cards
    known = {item.account: item.limits for item in there}
    return [
        Limit(account, ALL, known[account].get(ALL), most)
        for account, most in sorted(wanted.items())
        if account in known
    ]


def accounts_missing(cluster: Cluster, there: Iterable[Association], settings: SlurmSettings) -> list[str]:
    """Accounts of departments with a quota here that Slurm does not have."""
    if not Node.objects.filter(cluster=cluster).exists():
        return []
    known = {item.account for item in there}
    named = {settings.account_of(department) for department in wanted_limits(cluster=cluster)}
    return sorted(named - known)
