"""One allocation as a card of its holder's home: where it is, how far its time has run, what threatens it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pool.models import Allocation, IdleWatch, ReclaimCase
from portal.kernel.clock import now
from quotas.selectors.shapes import AskShape, amount_text, flavour_text

NODES_SHOWN = 2


def home_card(allocation: Allocation) -> dict[str, Any]:
    """From a row of `allocations_held`. `ran` is the share of its time that is over, in percent; None: no end."""
    watch: IdleWatch | None = getattr(allocation, "idle_watch", None)
    warned = watch is not None and watch.state == IdleWatch.State.IDLE and watch.warned_at is not None
    case: ReclaimCase | None = next(iter(allocation.open_cases), None)  # type: ignore[attr-defined]
    ends = case.grace_until if case is not None and case.grace_until else allocation.expires_at
    since = case.noticed_at if case is not None and case.noticed_at else allocation.reserved_at
    return {
        "a": allocation,
        "title": amount_text(AskShape.of(allocation.request), flavour_text(allocation.request)),
        "places": _places(allocation),
        "case": case,
        "idle": watch if warned else None,
        "ends": ends,
        "ran": _share(since, ends),
    }


def _places(allocation: Allocation) -> list[dict[str, Any]]:
    """Each node with its cards' numbers, at most two and how many more."""
    members = list(allocation.members.all())
    rows: list[dict[str, Any]] = []
    for member in members[:NODES_SHOWN]:
        leases = [le for le in allocation.held_now if le.member == member.number]  # type: ignore[attr-defined]
        rows.append({"node": member.node, "cards": ranges([le.gpu.index for le in leases])})
    if rows and len(members) > NODES_SHOWN:
        rows[-1]["more"] = len(members) - NODES_SHOWN
    return rows


def ranges(numbers: Sequence[int]) -> str:
    """``0–3, 5``: card numbers as people write them."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and parts[-1][-1] == n - 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ", ".join("–".join(str(n) for n in part) for part in parts)


def _share(since: datetime | None, ends: datetime | None) -> float | None:
    if since is None or ends is None or ends <= since:
        return None
    return min(100.0, max(0.0, 100 * ((now() - since) / (ends - since))))
