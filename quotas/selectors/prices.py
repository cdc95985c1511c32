"""Prices: which rate holds when, for one flavour and site.

The nearest department's own rate beats that of one above it, and that the general one (no department); among those of
one department a site's own beats that for all sites (site code ""). Where none holds there is no price, which is told
apart from a price of 0. The departments' tree is the present one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.models import F, Q, QuerySet

from portal.kernel.clock import now
from quotas.engine.billing import PriceSpan
from quotas.models import GpuFlavour, PriceRate
from quotas.selectors.trees import department_parents

FAR = datetime.max.replace(tzinfo=UTC)


Parents = Mapping[int, int | None]


def general_rates(at: datetime) -> QuerySet[PriceRate]:
    """The rates in force at a moment that hold for everybody at all sites."""
    return PriceRate.objects.filter(site_code="", department=None, during__contains=at)


def general_prices(at: datetime) -> dict[int, int]:
    """What a GPU-hour of each flavour costs everybody at all sites, power included."""
    return {rate.flavour_id: rate.charged_micro for rate in general_rates(at)}


def rates_now(
    flavour_ids: Iterable[int] | None,
    *,
    at: datetime,
    site_code: str,
    department_id: int | None,
    parents: Parents | None = None,
) -> dict[int, int]:
    """What a GPU-hour costs a department at a moment, by flavour. Without a site the dearest of the sites' own and
    the general one, for nobody knows yet where it will run.
    """
    query = PriceRate.objects.filter(during__contains=at)
    if flavour_ids is not None:
        query = query.filter(flavour_id__in=set(flavour_ids))
    if site_code:
        query = query.filter(site_code__in=["", site_code])
    rows = list(query)
    near: dict[int, int] = {}
    if any(rate.department_id is not None for rate in rows):
        path = _path(department_id, parents if parents is not None else department_parents())
        near = {pk: len(path) - step for step, pk in enumerate(path)}
        rows = [rate for rate in rows if rate.department_id is None or rate.department_id in near]
    found: dict[int, tuple[int, bool, int]] = {}
    for rate in rows:
        own_site = bool(site_code) and rate.site_code == site_code
        key = (near.get(rate.department_id or 0, 0), own_site, rate.charged_micro)
        if rate.flavour_id not in found or key > found[rate.flavour_id]:
            found[rate.flavour_id] = key
    return {flavour_id: micro for flavour_id, (_near, _own, micro) in found.items()}


def _path(department_id: int | None, parents: Parents) -> list[int]:
    """The department and those above it, itself first."""
    path: list[int] = []
    while department_id is not None and department_id not in path:
        path.append(department_id)
        department_id = parents.get(department_id)
    return path


def rates(*, flavour_id: int | None = None, site_code: str | None = None) -> QuerySet[PriceRate]:
    """All price versions in order of flavour, site and time."""
    found = PriceRate.objects.select_related("flavour", "department")
    if flavour_id is not None:
        found = found.filter(flavour_id=flavour_id)
    if site_code is not None:
        found = found.filter(site_code=site_code)
    return found.order_by(
        "flavour__position",
        "flavour__name",
        "flavour_id",
        F("department_id").asc(nulls_first=True),
        "site_code",
        "during",
    )


def price_spans(*, flavour_id: int, site_code: str = "", since: datetime | None = None) -> list[PriceSpan]:
    """The prices of one flavour at one site as spans that do not overlap, for the billing engine."""
    return PriceBook.load([flavour_id], since=since).spans(flavour_id, site_code)


@dataclass
class PriceBook:
    """Price versions of some flavours in memory: one query for any number of cuts."""

    by_key: dict[tuple[int, str, int | None], list[PriceSpan]]
    parents: Parents = field(default_factory=dict, repr=False)
    _known: dict[tuple[int, str, int | None], list[PriceSpan]] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, flavour_ids: Iterable[int] | None = None, *, since: datetime | None = None) -> PriceBook:
        """Read the rates (of all flavours when None) that hold at or after `since`."""
        query = Q()
        if flavour_ids is not None:
            query &= Q(flavour_id__in=set(flavour_ids))
        if since is not None:
            query &= Q(during__endswith__gt=since) | Q(during__upper_inf=True)
        book: dict[tuple[int, str, int | None], list[PriceSpan]] = defaultdict(list)
        for rate in PriceRate.objects.filter(query).order_by("during"):
            book[rate.flavour_id, rate.site_code, rate.department_id].append(
                PriceSpan(str(rate.uid), rate.charged_micro, rate.during.lower, rate.during.upper)
            )
        owned = any(department is not None for _flavour, _site, department in book)
        return cls(dict(book), department_parents() if owned else {})

    def spans(
        self, flavour_id: int, site_code: str = "", department_id: int | None = None
    ) -> list[PriceSpan]:
        """Prices of a flavour at a site for a department in time order: the nearest ones, and between them those
        that hold further away. Without a department the general ones.
        """
        key = (flavour_id, site_code, department_id if self.parents else None)
        if key not in self._known:
            self._known[key] = self._spans(*key)
        return self._known[key]

    def _spans(self, flavour_id: int, site_code: str, department_id: int | None) -> list[PriceSpan]:
        merged: list[PriceSpan] = []
        for owner in (*_path(department_id, self.parents), None):
            for site in (site_code, "") if site_code else ("",):
                further = self.by_key.get((flavour_id, site, owner), [])
                if further:
                    merged = sorted([*merged, *_without(further, merged)], key=lambda span: span.start)
        return merged


def _without(spans: Sequence[PriceSpan], holes: Sequence[PriceSpan]) -> list[PriceSpan]:
    """`spans` minus the times of `holes` (both ordered, without overlaps)."""
    left: list[PriceSpan] = []
    for span in spans:
        start = span.start
        end = span.end or FAR
        for hole in holes:
            hole_end = hole.end or FAR
            if hole_end <= start or hole.start >= end:
                continue
            if hole.start > start:
                left.append(PriceSpan(span.version, span.micro_per_gpu_hour, start, hole.start))
            start = hole_end
            if start >= end:
                break
        if start < end:
            left.append(PriceSpan(span.version, span.micro_per_gpu_hour, start, None if end == FAR else end))
    return left


def flavours_without_price(*, at: datetime | None = None) -> list[GpuFlavour]:
    """Flavours on offer that have no general rate at a moment (now when None)."""
    moment = at or now()
    return list(
        GpuFlavour.objects.filter(active=True).exclude(pk__in=general_rates(moment).values("flavour_id"))
    )
