"""What the pool has that a request may name: sites, data sets, networks, storage, places in the rooms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from portal.accounts.policy import Policy
from quotas.models import GpuFlavour, PoolName


def sites_named() -> dict[str, str]:
    """Code → name of all sites."""
    rows = PoolName.objects.filter(kind=PoolName.Kind.SITE, active=True).order_by("name", "code")
    return {row.code: row.name or row.code for row in rows}


def site_problem(code: str) -> str:
    """What is wrong with a site's code as typed; "" where nothing is, or no site is known yet."""
    known = sites_named()
    if not code or not known or code in known:
        return ""
    return _("There is no such site. Known: {names}.").format(names=", ".join(known))


def datasets_named(policy: Policy) -> QuerySet[PoolName]:
    """Data sets that a person may name: those of nobody in particular, and those of departments for which
    they may ask or that they read.
    """
    rows = PoolName.objects.filter(kind=PoolName.Kind.DATASET, active=True)
    if policy.administers_pool:
        return rows.order_by("code")
    scope = (policy.asks_for | policy.reads).q("department")
    return rows.filter(Q(department=None) | scope).order_by("code")


def facts_of(flavour: GpuFlavour) -> Mapping[str, Any]:
    """What the nodes of a flavour offer, as the pool told it; {} where it has not."""
    capacity = getattr(flavour, "capacity", None)
    found: Mapping[str, Any] = capacity.facts if capacity is not None else {}
    return found


def fabrics_of(flavours: Iterable[GpuFlavour]) -> dict[str, int]:
    """Kind of network → highest Gbit/s on any node of the flavours."""
    out: dict[str, int] = {}
    for flavour in flavours:
        for kind, speed in (facts_of(flavour).get("fabrics") or {}).items():
            out[kind] = max(out.get(kind, 0), int(speed))
    return out


def storage_of(flavours: Iterable[GpuFlavour]) -> list[str]:
    """Kinds of storage on nodes of the flavours, by name."""
    return sorted({kind for flavour in flavours for kind in facts_of(flavour).get("storage") or []})


def levels_of(flavours: Iterable[GpuFlavour]) -> dict[str, int]:
    """Row, rack, switch → the most nodes of one flavour that share one."""
    out: dict[str, int] = {}
    for flavour in flavours:
        for level, nodes in (facts_of(flavour).get("levels") or {}).items():
            out[level] = max(out.get(level, 0), int(nodes))
    return out
