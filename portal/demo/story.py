"""The history as a plan: who held what, from when to when. Pure: same anchor in, same story out.

The fleet fills up over 90 days, from about a quarter to three quarters of its cards, with quieter nights and
weekends. No two lives overlap on a card or slice, so that each can be written by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from portal.demo import cast, fleet

SEED = 20260616
STEP = timedelta(hours=2)
LOCAL = timedelta(hours=8)  # the organisation's clock, for nights and weekends
LATEST_END = timedelta(minutes=12)
NEVER = frozenset(fleet.BEHAVIOUR)
"""Cards that have a fault to show: no history on them."""

# Sizes with their weights, by cards on a node
SIZES = ((1, 30), (2, 24), (4, 26), (8, 20))
ENDS = (("finished", 66), ("released", 17), ("expired", 11), ("failed", 6))


@dataclass(frozen=True, slots=True)
class Seat:
    """A card, a MIG slice of one (`start` ≥ 0), or a half of one (`milli` 500)."""

    node: str
    index: int
    start: int = -1
    profile: str = ""
    milli: int = 1000

    @property
    def card(self) -> tuple[str, int]:
        """The card it is on."""
        return self.node, self.index


@dataclass(frozen=True, slots=True)
class Life:
    """One request from its submission to its end. `hours` is what was asked for."""

    number: int
    person: str
    department: str
    flavour: str
    shape: str
    seats: tuple[Seat, ...]
    submitted_at: datetime
    decided_at: datetime
    started_at: datetime
    ended_at: datetime
    hours: int
    end: str
    purpose: str
    load: float

    @property
    def token(self) -> str:
        """Names it in the database: a second run finds it there."""
        return f"demo-{self.number:05d}"


def target(moment: datetime, begin: datetime, end: datetime) -> float:
    """Share of the cards that should be busy."""
    passed = (moment - begin) / (end - begin)
    rise = 0.24 + 0.54 / (1 + math.exp(-7 * (passed - 0.45)))
    local = moment + LOCAL
    night = -0.06 if local.hour < 8 else 0.02
    weekend = -0.07 if local.weekday() >= 5 else 0.0
    return min(0.92, max(0.08, rise + night + weekend))


def seats_of(model: str) -> list[list[Seat]]:
    """Whole cards of a model by node, without split and faulty ones."""
    rows = []
    for _site, node, kind, count, split in fleet.LAYOUT:
        if kind.code == model:
            rows.append([Seat(node, i) for i in range(count) if i not in split and (node, i) not in NEVER])
    return rows


def special_seats() -> list[tuple[str, str, Seat]]:
    """(flavour, shape, seat) of slices, and of one card that is shared by halves."""
    found = []
    for _site, node, kind, _count, split in fleet.LAYOUT:
        for index in split:
            for profile, start, _size, _mib in fleet.SPLITS[kind.code]:
                found.append((kind.code, "mig", Seat(node, index, start, profile)))
    for half in (0, 500):
        found.append(("l20-48gb", "fraction", Seat("sh-l20-01", 3, half, "", 500)))
    return found


SHARED = ("sh-l20-01", 3)
"""The card that is shared by halves."""


def story(anchor: datetime) -> list[Life]:
    """All lives in order of their start, numbered from 1."""
    rng = random.Random(SEED)
    begin = (anchor - timedelta(days=cast.DAYS)).replace(minute=0, second=0, microsecond=0)
    drafts: list[Life] = []
    for model in cast.GRANTS:
        drafts += _whole(rng, model, begin, anchor)
    for flavour, shape, seat in special_seats():
        drafts += _special(rng, flavour, shape, seat, begin, anchor)
    drafts.sort(key=lambda life: (life.started_at, life.seats[0].card, life.seats[0].start))
    return [_numbered(life, number) for number, life in enumerate(drafts, start=1)]


def _numbered(life: Life, number: int) -> Life:
    return Life(number, *(getattr(life, name) for name in list(Life.__slots__)[1:]))


def _whole(rng: random.Random, model: str, begin: datetime, anchor: datetime) -> Iterator[Life]:
    nodes = [[s for s in row if s.card != SHARED] for row in seats_of(model)]
    free_at = {seat: begin for row in nodes for seat in row}
    moment = begin
    while moment < anchor - timedelta(hours=1):
        for _try in range(6):
            start = moment + timedelta(seconds=rng.randrange(0, int(STEP.total_seconds()) - 600))
            rows = [[s for s in row if free_at[s] <= start] for row in nodes]
            room = target(moment, begin, anchor) * len(free_at) - sum(at > moment for at in free_at.values())
            sizes = [(n, w) for n, w in SIZES if n <= max(map(len, rows)) and n / 2 <= room]
            if not sizes:
                break
            size = rng.choices([n for n, _w in sizes], [w for _n, w in sizes])[0]
            row = min((r for r in rows if len(r) >= size), key=len)
            life = _life(rng, model, "whole", tuple(row[:size]), start, anchor)
            if life is None:
                break
            for seat in life.seats:
                free_at[seat] = life.ended_at + timedelta(minutes=2)
            yield life
        moment += STEP


def _special(
    rng: random.Random, flavour: str, shape: str, seat: Seat, begin: datetime, anchor: datetime
) -> Iterator[Life]:
    moment = begin + timedelta(hours=rng.randrange(1, 72))
    while moment < anchor - timedelta(hours=2):
        if rng.random() < target(moment, begin, anchor):
            life = _life(rng, flavour, shape, (seat,), moment, anchor)
            if life is None:
                return
            yield life
            moment = life.ended_at
        moment += timedelta(hours=rng.randrange(12, 120), seconds=rng.randrange(0, 3000))


def _life(
    rng: random.Random, flavour: str, shape: str, seats: tuple[Seat, ...], start: datetime, anchor: datetime
) -> Life | None:
    """One life on these seats; None where too little time is left for it."""
    weights = {d: g for d, g in cast.GRANTS[flavour].items() if d in cast.PURPOSES}
    department = rng.choices(list(weights), list(weights.values()))[0]
    people = [p.username for p in cast.PEOPLE if ("researcher", department) in p.roles and len(p.roles) == 1]
    person = rng.choice(people)
    ran = timedelta(minutes=int(60 * min(220, max(1.5, rng.lognormvariate(4.05, 0.75)))))
    ran = min(ran, anchor - LATEST_END - timedelta(minutes=rng.randrange(0, 40)) - start)
    if ran < timedelta(minutes=40):
        return None
    end = rng.choices([e for e, _w in ENDS], [w for _e, w in ENDS])[0]
    hours = max(1, math.ceil(ran / timedelta(hours=1) * (1 if end == "expired" else rng.uniform(1.05, 1.6))))
    if end == "expired":
        ran = min(timedelta(hours=hours), anchor - LATEST_END - start)
        hours = max(1, math.ceil(ran / timedelta(hours=1)))
        end = "expired" if ran == timedelta(hours=hours) else "released"
    wait = timedelta(seconds=rng.randrange(120, 3000))
    decide = timedelta(seconds=rng.randrange(30, 90))
    return Life(
        number=0,
        person=person,
        department=department,
        flavour=flavour,
        shape=shape,
        seats=seats,
        submitted_at=start - wait,
        decided_at=start - wait + (wait - decide) * rng.random() * 0.9,
        started_at=start,
        ended_at=start + ran,
        hours=hours,
        end=end,
        purpose=rng.choice(cast.PURPOSES[department]),
        load=min(0.98, max(0.05, rng.betavariate(5, 2.2))),
    )
