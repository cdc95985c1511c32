"""What would happen if somebody asked for this: whether it would start now, and if not why and about when; what
would start sooner; what it costs. Nothing is written.

The quota's side (who must agree, which level blocks) is quotas' own judgement (``verdict_of``); here is the
pool's: places, the line, and wishes near the one that was typed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pool.selectors.fit import MAX_AGE_S, Fit, fit_check
from portal.kernel.clock import now
from portal.kernel.units import cost_micro
from quotas.engine.recurrence import occurrences
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.catalogue import mig_table
from quotas.selectors.prices import rates_now
from quotas.selectors.requests import Waits, waits_of
from quotas.selectors.shapes import AskShape
from quotas.services.asking_series import weekly_of

S = CapacityRequest.Shape
NOT_FIELDS = frozenset({"flavours", "after"})
SHOWN = 3
SHORTEST_S = 1800
NEAR_MEMORY = 0.9
"""Another model counts as near with at least this part of the memory."""


@dataclass(frozen=True, slots=True)
class Near:
    """A wish near the one that was typed, which would start now. ``kind`` says what is different; ``changes``
    are the fields of the request that make it; ``shape`` and ``flavour`` what it asks then.
    """

    kind: str
    changes: Mapping[str, Any]
    shape: AskShape
    flavour: GpuFlavour
    cost_micro: int | None
    seconds: int | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """``deadline``: met (even at the late end of the range), maybe, missed, unknown, "" where none was named;
    ``ends_by`` is the end that this rests on. ``history`` are past waits, told where the plan has no range.
    ``start_at`` is the begin of the window that was asked.
    """

    fit: Fit
    near: tuple[Near, ...] = ()
    deadline: str = ""
    ends_by: datetime | None = None
    history: Waits | None = None
    start_at: datetime | None = None


def what_if(
    cleaned: Mapping[str, Any], *, user_id: int, offered: list[GpuFlavour], max_age_s: float = MAX_AGE_S
) -> WhatIf:
    """Judge cleaned wishes (``read_request``) as one request, or as one member of a series, against the pool as
    it was at most ``max_age_s`` seconds ago.
    """
    one = _single(cleaned)
    fit = fit_check(request_from(one, user_id), max_age_s=max_age_s)
    later = one["start_at"] is not None and one["start_at"] > now()
    near = () if fit.starts_now or later else tuple(_near(one, fit, user_id, offered))
    history = None
    if not fit.starts_now and fit.start_from is None and one["flavours"]:
        first = one["flavours"][0]
        history = waits_of(first.pk, AskShape.of(one).charge(first))
    verdict, ends = _deadline(one, fit)
    return WhatIf(fit, near, verdict, ends, history, one["start_at"])


def request_from(cleaned: Mapping[str, Any], user_id: int) -> CapacityRequest:
    """The request that these wishes would make; never saved."""
    fields = {name: value for name, value in cleaned.items() if name not in NOT_FIELDS}
    made = CapacityRequest(**fields, requester_id=user_id)
    if made.flavour is None:
        made.options = [flavour.code for flavour in cleaned["flavours"]]
    return made


def _single(cleaned: Mapping[str, Any]) -> dict[str, Any]:
    """One member of a series: a replica, an array's member, the next window."""
    one = dict(cleaned)
    if one["series"] == CapacityRequest.Series.SERVICE:
        one["nodes"] = 1
    elif one["series"] == CapacityRequest.Series.WINDOW:
        moment = now()
        coming = next(occurrences(weekly_of(one["window"]), moment, moment + timedelta(days=740)), None)
        if coming is not None:
            one |= {"start_at": coming.start, "end_at": coming.end, "duration_s": coming.seconds}
    one["series"] = ""
    return one


def _deadline(one: Mapping[str, Any], fit: Fit) -> tuple[str, datetime | None]:
    """("met" | "maybe" | "missed" | "unknown" | "", the end that this rests on)."""
    deadline, length = one["deadline_at"], one["duration_s"]
    if deadline is None or length is None:
        return "", None
    run = timedelta(seconds=length)
    if fit.starts_now:
        end = max(now(), one["start_at"] or now()) + run
        return ("met" if end <= deadline else "missed"), end
    if fit.start_from is None:
        return "unknown", None
    early, late = fit.start_from + run, (fit.start_to or fit.start_from) + run
    if late <= deadline:
        return "met", late
    return ("maybe", late) if early <= deadline else ("missed", early)


def _near(one: Mapping[str, Any], fit: Fit, user_id: int, offered: list[GpuFlavour]) -> Iterator[Near]:
    """Up to three near wishes that would start now, each of another kind."""
    rates = rates_now(None, at=now(), site_code=one["site_code"], department_id=one["department"].pk)
    found: set[str] = set()
    for kind, changes in _variants(one, fit, offered):
        if kind in found or len(found) >= SHOWN:
            continue
        changed = {**one, **changes}
        if "flavour" in changes:
            changed["flavours"] = [changes["flavour"]]
        if not fit_check(request_from(changed, user_id), in_line=kind == "shorter").starts_now:
            continue
        found.add(kind)
        flavour = changed["flavours"][0]
        shape, seconds = AskShape.of(changed), changed["duration_s"]
        rate = rates.get(flavour.pk)
        cost = cost_micro(shape.charge(flavour) * seconds, rate) if rate is not None and seconds else None
        told = {name: getattr(value, "code", value) for name, value in changes.items()}
        yield Near(kind, told, shape, flavour, cost, seconds)


def _variants(
    one: Mapping[str, Any], fit: Fit, offered: list[GpuFlavour]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Near wishes, the mildest change first; several of one kind from large to small."""
    if one["shape"] == S.CPU or not one["flavours"]:
        return
    first: GpuFlavour = one["flavours"][0]
    if not one["interruptible"]:
        yield "interruptible", {"interruptible": True}
    if fit.reason == "behind" and (free_until := fit.figures.get("reserved_from")):
        room = int((datetime.fromisoformat(str(free_until)) - now()).total_seconds()) // 1800 * 1800
        if one["duration_s"] and SHORTEST_S <= room < one["duration_s"]:
            yield "shorter", {"duration_s": room}
    if one["shape"] == S.WHOLE:
        for nodes in _halves(one["nodes"]):
            yield "fewer_nodes", {"nodes": nodes, "nodes_min": None}
        if one["nodes"] == 1:
            for gpus in _halves(one["gpus_per_node"]):
                yield "fewer", {"gpus_per_node": gpus}
    elif one["shape"] == S.MIG:
        for count in _halves(one["mig_count"]):
            yield "fewer", {"mig_count": count}
    for other in offered:
        near_memory = other.memory_mib >= first.memory_mib * NEAR_MEMORY
        if (
            other.pk not in {flavour.pk for flavour in one["flavours"]}
            and near_memory
            and _has_shape(one, other)
        ):
            yield "other_model", {"flavour": other, "requirement": {}}
    if one["shape"] == S.WHOLE and one["gpus_per_node"] == one["nodes"] == 1:
        yield from _parts(first)


def _parts(flavour: GpuFlavour) -> Iterator[tuple[str, dict[str, Any]]]:
    """Half a card: as a MIG slice of about half, and as a fraction."""
    table = mig_table(flavour.mig_table) if flavour.mig_capable else None
    plain = (
        [p for p in table.profiles if "+" not in p.name and "-" not in p.name] if table is not None else []
    )
    halves = [p for p in plain if table is not None and p.compute_slices * 2 <= table.compute_slices]
    for profile in sorted(halves, key=lambda p: -p.compute_slices)[:1]:
        yield "mig", {"shape": str(S.MIG), "mig_profile": profile.name, "mig_count": 1}
    half = {"fraction_milli": 500, "fraction_mib": flavour.memory_mib // 2}
    yield "fraction", {"shape": str(S.FRACTION), **half}


def _has_shape(one: Mapping[str, Any], flavour: GpuFlavour) -> bool:
    if one["shape"] != S.MIG:
        return True
    table = mig_table(flavour.mig_table) if flavour.mig_capable else None
    return table is not None and table.get(one["mig_profile"]) is not None


def _halves(count: int) -> Iterator[int]:
    """8 → 4, 2, 1."""
    while count > 1:
        count //= 2
        yield count
