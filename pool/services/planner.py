"""What the planner of a process keeps between cycles: the pool, the queue and the quotas as the engine reads them,
brought up to date by what the change feed names instead of being read anew.

A memory is only ever used under the planner's lock. After ``refresh`` it equals what a fresh read of everything
would give as of one state of the database (pool/services/feed.py says why); a test holds it to that after random
changes. It also tells what kind of news there was, so that a new request does not make 15,000 others be judged
again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from uuid import uuid4

from pool.engine import model
from pool.engine.loop_guard import back_off_until
from pool.selectors.planner_nodes import facts_of, nodes_read
from pool.selectors.planner_queue import (
    Asked,
    Holding,
    PersonLimits,
    held_now,
    requests_read,
    user_limits_read,
    user_rooms,
)
from pool.selectors.planner_running import running_read
from pool.selectors.reclaim import (
    Displaced,
    Modes,
    closed_windows,
    evictions_by_request,
    kept_places,
    minimum_runs,
)
from pool.services.feed import Look, changes_since, one_snapshot, unseen
from pool.services.queue_entries import UNKNOWN, Known
from portal.accounts.models import Department
from portal.kernel.units import to_ms
from quotas.engine.tree import QuotaNode
from quotas.models import GpuFlavour
from quotas.selectors.trees import quota_trees

RELOAD = frozenset({"all", "flavour"})
"""Kinds of change after which everything is read anew: rare, and much hangs on them."""


@dataclass(slots=True)
class News:
    """What happened since the last plan. ``freed`` names why all requests must be judged again, "" when nothing
    did that; ``queued`` are requests that came in line.
    """

    freed: str = "first"
    queued: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Taking:
    """What taking back says: places kept, who was displaced how often, which nodes will be out of service when, and
    whose work is spared.
    """

    kept: tuple[model.Kept, ...] = ()
    displaced: dict[int, Displaced] = field(default_factory=dict)
    closed: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    modes: Modes | None = None

    @classmethod
    def read(cls, modes: Modes | None) -> Taking:
        """Read it; the modes only where they are not known."""
        return cls(kept_places(), evictions_by_request(), closed_windows(), modes or Modes.load())

    def mark(self, one: model.Running) -> model.Running:
        """Running work with what is known of it."""
        spared = self.modes is not None and self.modes.spares(one.department_id, one.request_id) is not None
        times = self.displaced[one.request_id].times if one.request_id in self.displaced else 0
        return one if not spared and not times else replace(one, spared=spared, evictions=times)

    def request(self, item: model.Request, policy: model.Policy) -> model.Request:
        """A displaced request that waits again: by whom, how often, and until when it may displace nobody."""
        known = self.displaced[item.id]
        return replace(
            item,
            evictions=known.times,
            displaced_by=known.by,
            evicts_after=back_off_until(known.times, policy, to_ms(known.last_at)),
        )


class PlannerMemory:
    """The database as one planner has last seen it. Not thread-safe: its user holds the planner's lock."""

    def __init__(self) -> None:
        self.uid = str(uuid4())
        self.look: Look | None = None
        self.loads = 0
        self.news = News()
        self.nodes: dict[int, model.Node] = {}
        self.running: dict[int, model.Running] = {}
        self.asked: dict[int, Asked] = {}
        self.holding: dict[int, Holding] = {}
        self.quotas: dict[int, tuple[QuotaNode, ...]] = {}
        self.flavours: list[GpuFlavour] = []
        self.facts: tuple[model.FlavourFacts, ...] = ()
        self.codes: dict[int, str] = {}
        self.limits: dict[int | None, PersonLimits] = {}
        self.names: dict[int, str] = {}
        self.taking = Taking()
        self.served: dict[int, model.Node] = {}
        """The nodes, with the times at which they will be out of service."""
        self.promised: tuple[model.Reserve, ...] = ()
        self.mix: model.Mix | None = None
        self.user_use: dict[int, int] = {}
        """What was learnt from history, by whoever uses this memory; no part of what is kept up to date."""
        self.marked: dict[int, model.Running] = {}
        """What runs, with what the history of taking back and the modes say of it."""
        self.entries: Known | None = None
        """The queue entries as they were written last; None: not known, somebody else wrote them."""

    def refresh(self) -> News:
        """Bring the memory up to date; returns all news since ``planned`` was last called."""
        with one_snapshot() as look:
            changed = changes_since(self.look) if self.look and look.continues(self.look) else {"all": {0}}
            if RELOAD.isdisjoint(changed):
                self._update(changed)
            else:
                self._load()
            self._taking(changed)
            if look.entries_by != self.uid:
                self.entries = None
            self.look = look
        return self.news

    def forget(self) -> None:
        """Know nothing any more: after an error nobody can say what still holds."""
        self.look, self.entries = None, None

    def planned(self, promised: tuple[model.Reserve, ...] | None = None) -> None:
        """All news so far went into a plan; ``promised``: what a whole one promised."""
        self.news = News(freed="")
        if promised is not None:
            self.promised = promised

    def behind(self) -> bool:
        """Whether something was committed since the last look."""
        return self.look is None or unseen(self.look)

    def snapshot(self, policy: model.Policy, *, promised: bool = False) -> model.Snapshot:
        """What one decision looks at. ``policy``: how long who was displaced too often rests. ``promised``: with
        the promises of the last whole plan, for a decision about some requests only.
        """
        people = {one.requester_id for one in self.asked.values()} if self.limits else set()
        held = held_now(self.holding, self.running.values()) if self.limits else {}
        taking = self.taking
        return model.Snapshot(
            nodes=tuple(self.served.values()),
            flavours=self.facts,
            running=tuple(self.marked.values()),
            pending=tuple(
                one.item if pk not in taking.displaced else taking.request(one.item, policy)
                for pk, one in self.asked.items()
            ),
            quotas={self.codes[pk]: nodes for pk, nodes in self.quotas.items() if pk in self.codes},
            users=user_rooms(self.limits, held, people, self.holding.values()),
            kept=taking.kept,
            promised=self.promised if promised else (),
            mix=self.mix,
            user_use=self.user_use if policy.user_decay else {},
            minimum_run=minimum_runs(taking.modes.minimum.values()) if taking.modes is not None else {},
        )

    @property
    def flavour_ids(self) -> dict[str, int]:
        """Ids by code."""
        return {code: pk for pk, code in self.codes.items()}

    @property
    def uids(self) -> dict[int, str]:
        """Public ids of those in line."""
        return {pk: one.uid for pk, one in self.asked.items()}

    def _load(self) -> None:
        self.loads += 1
        self.news = News("loaded")
        self.flavours = list(GpuFlavour.objects.all())
        self.codes = {one.pk: one.code for one in self.flavours}
        self.facts = tuple(facts_of(one) for one in self.flavours)
        self.nodes = nodes_read(self.flavours)
        self.running = running_read(self.codes)
        self.asked, self.holding = requests_read()
        self.quotas = {pk: tree.snapshot() for pk, tree in quota_trees().items()}
        self.limits = user_limits_read()
        self._name()
        self.entries = None

    def _update(self, changed: dict[str, set[int]]) -> None:
        for kind in ("mode", "policy"):
            if kind in changed:
                self._freed(kind)
        if "place" in changed:
            self._nodes(None)
        elif changed.keys() & {"node", "gpu"}:
            self._nodes(changed.get("node", set()) | self._nodes_of(changed.get("gpu", ())))
        if "allocation" in changed:
            self._running(changed["allocation"])
        if "request" in changed:
            self._requests(changed["request"])
        if "tree" in changed:
            self._name()
        if changed.keys() & {"tree", "quota"}:
            self._quotas(None if "tree" in changed else changed["quota"])
        if "user" in changed:
            self.limits = user_limits_read()
            self._freed("user")

    def _taking(self, changed: dict[str, set[int]]) -> None:
        """What taking back says of places, work and requests; only what it changes is marked anew."""
        everything = "all" in changed or "flavour" in changed
        before = self.taking
        modes = changed.keys() & {"mode", "tree"} or everything
        self.taking = Taking.read(None if modes else before.modes)
        if set(before.kept) - set(self.taking.kept):
            self._freed("kept")
        if everything or self.taking.closed != before.closed or changed.keys() & {"node", "gpu", "place"}:
            self._serve()
        if modes or self.taking.displaced != before.displaced:
            self.marked = {pk: self.taking.mark(one) for pk, one in self.running.items()}
            return
        for pk in changed.get("allocation", ()):
            if pk in self.running:
                self.marked[pk] = self.taking.mark(self.running[pk])
            else:
                self.marked.pop(pk, None)

    def _serve(self) -> None:
        closed = self.taking.closed
        for pk in self.served.keys() - self.nodes.keys():
            del self.served[pk]
        for pk, node in self.nodes.items():
            served = node if pk not in closed else replace(node, closed=closed[pk])
            if self.served.get(pk) != served:
                self.served[pk] = served
                self._freed("node")

    def _freed(self, why: str) -> None:
        self.news.freed = self.news.freed or why

    def _name(self) -> None:
        self.names = dict(Department.objects.without_tree_fields().values_list("pk", "name"))

    def _nodes_of(self, gpu_ids: Iterable[int]) -> set[int]:
        wanted = set(gpu_ids)
        return {node.id for node in self.nodes.values() if any(gpu.id in wanted for gpu in node.gpus)}

    def _nodes(self, ids: Collection[int] | None) -> None:
        found = nodes_read(self.flavours, ids)
        before = self.nodes if ids is None else {pk: self.nodes[pk] for pk in ids if pk in self.nodes}
        if found == before:
            return
        self._freed("node")
        for pk in before.keys() - found.keys():
            del self.nodes[pk]
        self.nodes |= found

    def _running(self, ids: Collection[int]) -> None:
        found = running_read(self.codes, ids)
        for pk in ids:
            before, after = self.running.get(pk), found.get(pk)
            if before is not None and (after is None or _gives_way(before, after)):
                self._freed("allocation")
            if after is None:
                self.running.pop(pk, None)
            else:
                self.running[pk] = after

    def _requests(self, ids: Collection[int]) -> None:
        asked, holding = requests_read(ids)
        for pk in ids:
            if self.entries is not None and pk in self.entries.signatures:
                self.entries.signatures[pk] = UNKNOWN
            before, after = self.asked.pop(pk, None), asked.get(pk)
            if after is not None:
                self.asked[pk] = after
                if before is None:
                    self.news.queued.add(pk)
                elif before != after:
                    self._freed("request")
            else:
                self.news.queued.discard(pk)
                if before is not None and pk not in holding:
                    self._freed("request")
            self.holding.pop(pk, None)
            if pk in holding:
                self.holding[pk] = holding[pk]

    def _quotas(self, flavour_ids: Collection[int] | None) -> None:
        found = {pk: tree.snapshot() for pk, tree in quota_trees(flavour_ids).items()}
        for pk, after in found.items():
            if _loosened(self.quotas.get(pk, ()), after):
                self._freed("quota")
            self.quotas[pk] = after
        if flavour_ids is None:
            for pk in self.quotas.keys() - found.keys():
                del self.quotas[pk]


def _gives_way(before: model.Running, after: model.Running) -> bool:
    """Whether a change of what runs can let another start, or start at another time than was planned."""
    if after.ending and not before.ending:
        return before.members != after.members  # a plan's own doing, or news again when its places are free
    return (before.members, before.ends_at, before.interruptible, before.priority) != (
        after.members,
        after.ends_at,
        after.interruptible,
        after.priority,
    )


def _loosened(before: tuple[QuotaNode, ...], after: tuple[QuotaNode, ...]) -> bool:
    """Whether limits or the tree changed, or less is used: more use alone lets nobody start."""
    if len(before) != len(after):
        return True
    return any(
        old is not new and old != new and _differs(old, new) for old, new in zip(before, after, strict=True)
    )


def _differs(old: QuotaNode, new: QuotaNode) -> bool:
    return (
        new.total < old.total
        or new.total_noninterruptible < old.total_noninterruptible
        or (
            (
                old.id,
                old.parent,
                old.guarantee,
                old.own,
                old.borrow_limit,
                old.lend_limit,
                old.hard_cap,
                old.weight,
            )
            != (
                new.id,
                new.parent,
                new.guarantee,
                new.own,
                new.borrow_limit,
                new.lend_limit,
                new.hard_cap,
                new.weight,
            )
        )
    )
