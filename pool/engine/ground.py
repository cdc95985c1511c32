"""How near each node is to having room for a request, as candidates give way one after the other.

Counting only: per node the cards (or slices) that would be free enough. It says when a look at the real places is
worth its price, and who stands on the nodes in question. It may say so too early (host, networks and quota are left
to the look), never too late.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pool.engine.fit import Need, gpu_refusal
from pool.engine.model import Member, Request
from pool.engine.world import World


class Ground:
    """``rows``: the nodes (by row) that have room by count. A gang needs as many as it has nodes."""

    def __init__(self, world: World, request: Request, need: Need) -> None:
        self.state, self.request, self.need = world.state, request, need
        self.fleet = world.state.fleet
        self.eligible = self.fleet.eligible(request)
        self.rows: set[int] = set()
        self._cards: dict[int, dict[int, int]] = {}
        self._slices: dict[int, int] = {}
        rows = self.fleet.by_flavour.get(need.flavour or "", [])
        if request.nodes == 1 and request.shape != "mig":
            rows = self._roomy(rows)
        for row in rows:
            self._judge(row)

    @property
    def enough(self) -> bool:
        return len(self.rows) >= self.request.nodes

    def give_way(self, members: Iterable[Member]) -> bool:
        """Count members out; whether a node has room now that had none."""
        before = len(self.rows)
        for member in members:
            row = self.fleet.node_row.get(member.node_id)
            if row is None or row in self.rows or not self.eligible[row]:
                continue
            free = self._of(row)
            for take in member.takes:
                card = self.fleet.card_row.get(take.gpu_id)
                if card not in free:
                    continue
                if self.request.shape != "mig":
                    free[card] += sum(high - low for low, high in take.spans)
                elif take.slice_id is None:
                    free[card] = self._slices[card]
                else:
                    slices = self.fleet.cards[card].slices
                    free[card] += any(
                        one.id == take.slice_id and one.profile == self.request.profile for one in slices
                    )
            self._judge(row)
        return len(self.rows) > before

    def stands_on(self, members: Iterable[Member]) -> bool:
        """Whether any of the members stands on a node that has room by count."""
        return any(self.fleet.node_row.get(member.node_id) in self.rows for member in members)

    def _judge(self, row: int) -> None:
        if not self.eligible[row]:
            return
        free = self._of(row)
        if self.request.shape == "mig":
            units = sum(free.values())
        else:
            units = sum(milli >= self.need.milli for milli in free.values())
        if units >= self.request.per_node:
            self.rows.add(row)

    def _roomy(self, rows: list[int]) -> list[int]:
        """The rows with enough cards that are free enough: a quick count that is never too low."""
        free = np.array(self.state.milli) >= self.need.milli
        counted = np.concatenate(([0], np.cumsum(free)))
        first = np.array(self.fleet.first)
        there = counted[first[1:]] - counted[first[:-1]]
        return [row for row in rows if there[row] >= self.request.per_node]

    def _of(self, row: int) -> dict[int, int]:
        """Free milli-GPU, or free slices of the profile, of each card that the request may use."""
        free = self._cards.get(row)
        if free is None:
            free = self._cards[row] = {}
            for card in range(self.fleet.first[row], self.fleet.first[row + 1]):
                gpu = self.fleet.cards[card]
                if gpu_refusal(gpu, self.request, self.need.flavour or "") is not None:
                    continue
                if self.request.shape == "mig":
                    profile = self.request.profile
                    self._slices[card] = sum(one.profile == profile for one in gpu.slices)
                    free[card] = sum(one.profile == profile for one in self.state.slices_of(card))
                else:
                    free[card] = self.state.milli[card]
        return free
