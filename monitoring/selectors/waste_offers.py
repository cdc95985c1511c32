"""Which cheaper flavours could stand in for what somebody holds: on offer, priced, allowed, large enough, alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from monitoring.engine.waste import Offer
from pool.models import Allocation
from quotas.models import CapacityRequest, GpuFlavour, QuotaGrant
from quotas.selectors.flavours import flavours_on_offer, unmet
from quotas.selectors.prices import PriceBook
from quotas.selectors.trees import department_parents


@dataclass
class Shop:
    """Prices and flavours at a moment; what it reads, it reads once, and only when somebody asks."""

    at: datetime
    book: PriceBook
    _flavours: list[GpuFlavour] | None = None
    _parents: Mapping[int, int | None] = field(default_factory=dict)
    _shut: set[tuple[int, int]] = field(default_factory=set)

    def instead_of(self, row: Allocation, site_code: str) -> tuple[int, list[Offer]]:
        """The price of what an allocation holds (0: none), and the cheaper flavours that its request leaves open.

        Left out are flavours that its request's features or models rule out, that lack the NVLink which several
        cards of it may rest on, that are too few, that its department may not have, and all of them for requests that
        need a fabric, a storage or a place of their own.
        """
        if row.flavour is None or row.department_id is None:
            return 0, []
        price = self._price(row.flavour_id, site_code, row.department_id)
        request = row.request
        if (
            not price
            or request.fabric
            or request.storage
            or request.domain_required
            or request.replicas_max > 1
        ):
            return price, []
        self._load()
        found = []
        for other in self._flavours or []:
            cost = self._price(other.pk, site_code, row.department_id)
            if other.pk != row.flavour_id and 0 < cost < price and self._open(row, request, other):
                found.append(Offer(other.name, other.memory_mib, cost))
        return price, found

    def _load(self) -> None:
        if self._flavours is None:
            self._flavours = list(flavours_on_offer().filter(capacity__healthy_milli__gt=0))
            self._parents = department_parents()
            shut = QuotaGrant.objects.filter(during__contains=self.at, hard_cap=0)
            self._shut = set(shut.values_list("department_id", "flavour_id"))

    def _price(self, flavour_id: int | None, site_code: str, department_id: int) -> int:
        if flavour_id is None:
            return 0
        for span in self.book.spans(flavour_id, site_code, department_id):
            if span.start <= self.at and (span.end is None or self.at < span.end):
                return span.micro_per_gpu_hour
        return 0

    def _open(self, row: Allocation, request: CapacityRequest, other: GpuFlavour) -> bool:
        cards = request.gpus_per_node * request.nodes
        rests_on_nvlink = cards > 1 and row.flavour is not None and row.flavour.nvlink
        if unmet(other, request.requirement or {}) or (rests_on_nvlink and not other.nvlink):
            return False
        capacity = other.capacity
        if capacity.healthy_milli < 1000 * cards or capacity.largest_node_gpus < request.gpus_per_node:
            return False
        return not any((above, other.pk) in self._shut for above in self._path(row.department_id))

    def _path(self, department_id: int) -> list[int]:
        path: list[int] = []
        at: int | None = department_id
        while at is not None and at not in path:
            path.append(at)
            at = self._parents.get(at)
        return path
