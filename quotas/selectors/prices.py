"""Prices: which rate holds when, for one flavour and site.

A site's own rate beats the general one (site code ""); where neither holds there is no price, which is told
apart from a price of 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.models import Q, QuerySet

from portal.kernel.clock import now
from quotas.engine.billing import PriceSpan
from quotas.models import GpuFlavour, PriceRate

FAR = datetime.max.replace(tzinfo=UTC)


def rate_at(*, flavour_id: int, at: datetime, site_code: str = "") -> PriceRate | None:
    """The rate in force at a moment, the site's own before the general one; None when no price is set."""
    found = PriceRate.objects.filter(
        flavour_id=flavour_id, site_code__in={"", site_code}, during__contains=at
    )
    return max(found, key=lambda rate: rate.site_code != "", default=None)


def rates(*, flavour_id: int | None = None, site_code: str | None = None) -> QuerySet[PriceRate]:
    """All price versions in order of flavour, site and time."""
    found = PriceRate.objects.select_related("flavour")
    if flavour_id is not None:
        found = found.filter(flavour_id=flavour_id)
    if site_code is not None:
        found = found.filter(site_code=site_code)
    return found.order_by("flavour__position", "flavour__name", "flavour_id", "site_code", "during")


def price_spans(*, flavour_id: int, site_code: str = "", since: datetime | None = None) -> list[PriceSpan]:
    """The prices of one flavour at one site as spans that do not overlap, for the billing engine."""
    return PriceBook.load([flavour_id], since=since).spans(flavour_id, site_code)


@dataclass
class PriceBook:
    """Price versions of some flavours in memory: one query for any number of cuts."""

    by_key: dict[tuple[int, str], list[PriceSpan]]
    _known: dict[tuple[int, str], list[PriceSpan]] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, flavour_ids: Iterable[int] | None = None, *, since: datetime | None = None) -> PriceBook:
        """Read the rates (of all flavours when None) that hold at or after `since`."""
        query = Q()
        if flavour_ids is not None:
            query &= Q(flavour_id__in=set(flavour_ids))
        if since is not None:
            query &= Q(during__endswith__gt=since) | Q(during__upper_inf=True)
        book: dict[tuple[int, str], list[PriceSpan]] = defaultdict(list)
        for rate in PriceRate.objects.filter(query).order_by("during"):
            book[rate.flavour_id, rate.site_code].append(
                PriceSpan(str(rate.uid), rate.micro_per_gpu_hour, rate.during.lower, rate.during.upper)
            )
        return cls(dict(book))

    def spans(self, flavour_id: int, site_code: str = "") -> list[PriceSpan]:
        """Prices of a flavour at a site in time order: its own, and the general ones between them."""
        key = (flavour_id, site_code)
        if key not in self._known:
            self._known[key] = self._spans(flavour_id, site_code)
        return self._known[key]

    def _spans(self, flavour_id: int, site_code: str) -> list[PriceSpan]:
        own = self.by_key.get((flavour_id, site_code), []) if site_code else []
        general = self.by_key.get((flavour_id, ""), [])
        if not own or not general:
            return list(own or general)
        return sorted([*own, *_without(general, own)], key=lambda span: span.start)


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
        GpuFlavour.objects.filter(active=True).exclude(
            pk__in=PriceRate.objects.filter(site_code="", during__contains=moment).values("flavour_id")
        )
    )
