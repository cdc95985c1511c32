"""A request that the engine cannot judge never stalls the others: it is found, set aside and reported."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import structlog

from pool.engine.model import Plan, Request, Snapshot, Waiting
from portal.ops.services import incident_open
from quotas.models import CapacityRequest

log = structlog.get_logger(__name__)
CODE = "cannot_be_judged"
LAST = 1 << 40
Decide = Callable[[Snapshot], Plan]


class Quarantine:
    """Requests that made the engine fail, as they were then: one that was changed since is tried again."""

    def __init__(self) -> None:
        self._aside: dict[int, tuple[Request, str]] = {}

    def decide(self, snapshot: Snapshot, decide: Decide) -> tuple[Plan, Snapshot]:
        """The plan for everybody who can be judged, and the snapshot without the others.

        Raises what the engine raised where no single request is to blame (it fails for an empty queue too).
        """
        by_id = {one.id: one for one in snapshot.pending}
        for pk, (item, _) in list(self._aside.items()):
            if by_id.get(pk) != item:
                del self._aside[pk]
        sound = self._without(snapshot)
        try:
            return decide(sound), sound
        except Exception:
            decide(replace(snapshot, pending=()))
            self._set_aside(_failing(sound, sorted(sound.pending, key=lambda one: one.id), decide))
            sound = self._without(sound)
            return decide(sound), sound

    def waiting(self) -> list[Waiting]:
        """Those set aside, with the code ``cannot_be_judged``, behind everybody else of their line."""
        return [
            Waiting(
                request_id=pk,
                code=CODE,
                figures={"error": error},
                flavour=next(iter(item.flavours), None),
                position=LAST + rank,
                of=0,
                ahead=(),
            )
            for rank, (pk, (item, error)) in enumerate(sorted(self._aside.items()))
        ]

    def _without(self, snapshot: Snapshot) -> Snapshot:
        if not self._aside:
            return snapshot
        return replace(snapshot, pending=tuple(one for one in snapshot.pending if one.id not in self._aside))

    def _set_aside(self, found: Collection[tuple[Request, str]]) -> None:
        refs = CapacityRequest.objects.in_bulk([one.id for one, _ in found])
        for item, error in found:
            self._aside[item.id] = (item, error)
            log.error("request_cannot_be_judged", request=item.id, error=error)
            incident_open(
                kind="request_cannot_be_judged",
                dedupe_key=f"request_cannot_be_judged:{item.id}",
                subject=refs.get(item.id),
                facts={"request": item.id, "error": error},
            )


def _failing(snapshot: Snapshot, pending: list[Request], decide: Decide) -> list[tuple[Request, str]]:
    """Those of ``pending`` that the engine fails for, found by halves."""
    try:
        decide(replace(snapshot, pending=tuple(pending)))
    except Exception as error:  # whatever it is, it must not stop the others
        if len(pending) == 1:
            return [(pending[0], f"{type(error).__name__}: {error}"[:300])]
        middle = len(pending) // 2
        return [
            *_failing(snapshot, pending[:middle], decide),
            *_failing(snapshot, pending[middle:], decide),
        ]
    return []
