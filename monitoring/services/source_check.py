"""A dry run of a source: fetch it now and say what its answers would be matched with. Writes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from monitoring.models import MetricSource
from monitoring.services.scrape import (
    Claims,
    Target,
    claims_of,
    covered_by_better,
    heard,
    identified,
    rightful,
    secret_of,
    targets_of,
    verdict,
)
from monitoring.services.sources import require_admin
from monitoring.sources.reading import Scrape
from pool.executors.base import TerminalFailure
from pool.models import Gpu
from portal.kernel.clock import now
from portal.ops.actor import Actor

# What would become of a card that a source tells of; those that need a look first.
DOUBLE, FOREIGN, UNKNOWN, COVERED, PLACED, TAKEN = (
    "double",
    "foreign",
    "unknown",
    "covered",
    "placed",
    "taken",
)
ORDER = (DOUBLE, FOREIGN, UNKNOWN, COVERED, PLACED, TAKEN)


@dataclass(frozen=True, slots=True)
class Match:
    """One card that was told of. `state`: `taken` by its UUID, `placed` by node and index (its UUID was made up),
    `covered` by a better source, `unknown` here, `foreign` (of another node or cluster), `double` (claimed by others
    too; `others` names them)."""

    uuid: str
    state: str
    gpu: Gpu | None
    told_by: tuple[str, ...]
    others: tuple[str, ...] = ()
    model: str = ""
    instances: int = 0
    measures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """What one dry run saw. `code` as of a fetch (`ok`, or why not); `codes` counts addresses, `problems` lines."""

    code: str
    targets: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)
    matches: tuple[Match, ...] = ()

    @property
    def states(self) -> dict[str, int]:
        """How many cards there are of each state, those that need a look first."""
        found = Counter(match.state for match in self.matches)
        return {state: found[state] for state in ORDER if found[state]}


def source_check(*, acting_user: Actor, source: MetricSource) -> Look:
    """Fetch a source, switched on or off, and say what would be matched: no sample, event or incident comes of it."""
    require_admin(acting_user)
    try:
        secret = secret_of(source)
    except TerminalFailure as error:
        return Look(error.code)
    targets = targets_of(source)
    scrapes, codes = heard(source, targets, secret)
    claims, problems = claims_of(scrapes)
    gpus = identified(source, claims)
    covered = covered_by_better([gpu.pk for gpu in gpus.values()], source.kind, now())
    matches = [_match(source, uuid, claims, gpus.get(uuid), covered) for uuid in claims]
    matches.sort(
        key=lambda m: (
            ORDER.index(m.state),
            m.gpu.node.name if m.gpu else "",
            m.gpu.index if m.gpu else 0,
            m.uuid,
        )
    )
    return Look(
        verdict(codes, len(targets), scrapes), len(targets), dict(codes), dict(+problems), tuple(matches)
    )


def _match(source: MetricSource, uuid: str, claims: Claims, gpu: Gpu | None, covered: set[int]) -> Match:
    told = claims[uuid]
    mine, others = (None, []) if gpu is None else rightful(source, gpu, uuid, told)
    scrape = mine or told[0][1]
    card = scrape.readings.get((uuid, None))
    return Match(
        uuid=uuid,
        state=_state(uuid, gpu, mine, others, covered),
        gpu=gpu,
        told_by=tuple(sorted({name for target, one in told for name in _names(target, one, uuid)})),
        others=tuple(others),
        model=card.model if card is not None else "",
        instances=sum(heard == uuid and instance is not None for heard, instance in scrape.readings),
        measures=tuple(sorted(n for n, v in card.values.items() if v is not None))
        if card is not None
        else (),
    )


def _state(uuid: str, gpu: Gpu | None, mine: Scrape | None, others: list[str], covered: set[int]) -> str:
    if gpu is None:
        return UNKNOWN
    if others:
        return DOUBLE
    if mine is None:
        return FOREIGN
    if gpu.pk in covered:
        return COVERED
    return TAKEN if gpu.uuid == uuid else PLACED


def _names(target: Target, scrape: Scrape, uuid: str) -> set[str]:
    """Who told of it: the node whose address it was, else the hosts that its rows name."""
    if target.node is not None:
        return {target.node.name}
    return set().union(*(reading.hosts for (told, _), reading in scrape.readings.items() if told == uuid))
