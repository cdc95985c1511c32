"""The allocate action: walk the line once, place what may start, promise places to what is blocked, say
why.
"""

from __future__ import annotations

from dataclasses import dataclass

from pool.engine import backfill
from pool.engine.fit import Need, flavour_refusal, need_of
from pool.engine.model import (
    FlavourFacts,
    Member,
    Place,
    Policy,
    Request,
    Reserve,
    Snapshot,
    UserRoom,
)
from pool.engine.placement import find, scarcity
from pool.engine.reasons import Reason, flavour_reason, place_reason
from pool.engine.state import PoolState
from quotas.engine.available import Admission, admit
from quotas.engine.flavours import Mode, rank_modes
from quotas.engine.tree import QuotaTree


@dataclass(frozen=True, slots=True)
class Blocked:
    """A request that stays in line, in the order it was looked at."""

    request: Request
    reason: Reason
    reserve: Reserve | None


NEVER = frozenset({"larger_than_any_node", "too_few_nodes", "model_absent"})
"""Reasons that no release of running work can change: such a request stops nobody."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request may be charged as: ``usable`` in the order to try; ``exhausted`` is the first flavour
    that only the sum of the whole pool refuses; ``refusal`` is the first reason why a flavour is not
    usable."""

    usable: list[tuple[Need, Admission | None]]
    exhausted: Need | None
    refusal: Reason | None


class Cycle:
    """One pass of allocation over a snapshot. ``run`` is called once per request in line order."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: int) -> None:
        self.snapshot, self.policy, self.now = snapshot, policy, now
        self.facts: dict[str, FlavourFacts] = {facts.code: facts for facts in snapshot.flavours}
        self.trees = {code: QuotaTree(nodes) for code, nodes in snapshot.quotas.items()}
        self.users = dict(snapshot.users)
        self.state = PoolState(snapshot.nodes, [m for one in snapshot.running for m in one.members])
        self.nodes = sorted(snapshot.nodes, key=lambda node: node.id)
        running = sorted(snapshot.running, key=lambda one: one.allocation_id)
        self.occupied = [backfill.Occupied(one.members, one.ends_at) for one in running]
        self.demand = self._tied_demand()
        self.places: list[Place] = []
        self.reserves: list[Reserve] = []
        self.windows: list[Reserve] = []
        self.blocked: list[Blocked] = []
        # Free space only shrinks within a cycle: what failed once fails again.
        self._hopeless: dict[tuple[object, ...], Reason] = {}
        self._first_blocked: dict[str, int] = {}

    def run(self, request: Request) -> None:
        """Place the request, or note why it waits."""
        if request.start_at is not None and request.start_at > self.now:
            self.blocked.append(self._window(request, request.start_at))
            return
        ahead = self._strictly_ahead(request)
        if ahead is not None:
            strict = Reason("behind", {"requests": [ahead], "strict": True}, request.flavours[0])
            self.blocked.append(Blocked(request, strict, None))
            return
        options = self.options(request)
        if not options.usable:
            self.blocked.append(self._not_now(request, options))
            return
        first: Reason | None = None
        for need, admission in options.usable:
            reason = self._place(request, need, admission)
            if reason is None:
                return
            first = first or reason
        assert first is not None
        reserve = self._promise(request, options.usable[0][0])
        self.blocked.append(Blocked(request, first, reserve))
        if first.code not in NEVER:
            for flavour in request.flavours:
                self._first_blocked.setdefault(flavour, request.id)

    def _not_now(self, request: Request, options: Options) -> Blocked:
        """No flavour may be charged. Where only the whole pool's sum is in the way and its cards are in use
        indeed, the request waits for cards, with a promise as for every other that is blocked so."""
        if options.exhausted is not None:
            need = options.exhausted
            if find(self.state, self.state.view(None, holds=False), request, need) is None:
                reason = place_reason(self.state, request, need, self.policy)
                return Blocked(request, reason, self._promise(request, need))
        assert options.refusal is not None
        return Blocked(request, options.refusal, None)

    def options(self, request: Request) -> Options:
        """The flavours that may be charged now, in the order to try them, or why there is none."""
        if request.shape == "cpu":
            return Options([(Need(None, 0, 0, 0), None)], None, None)
        ranked: list[tuple[tuple[int, float, int], Need, Admission | None]] = []
        quota_reason: Reason | None = None
        exhausted: Need | None = None
        possible = False
        for index, code in enumerate(request.flavours):
            facts = self.facts.get(code)
            if flavour_refusal(request, facts) is not None or code not in self.state.by_flavour:
                continue
            need = need_of(request, facts)
            if need is None:
                continue
            possible = True
            limited = self._over_user_limit(request, need)
            if limited is not None:
                quota_reason = quota_reason or limited
                continue
            admission = self.admission(request, need)
            if admission is not None and not admission.fits:
                quota_reason = quota_reason or quota_blocked(code, admission)
                if exhausted is None and _only_the_pool(self.trees[code], admission):
                    exhausted = need
                continue
            mode: Mode = "fit" if admission is None or admission.borrowed == 0 else "borrow"
            rank = rank_modes(self.policy.flavour.preference, mode)
            if mode == "borrow" and self.policy.flavour.when_can_borrow == "stop":
                rank = 0
            scarce = scarcity(self.state, self.demand, code) if self._open_ask(request) else 0.0
            ranked.append(((rank, scarce, index), need, admission))
        if not possible:
            return Options([], None, flavour_reason(request, self.facts))
        ranked.sort(key=lambda row: row[0])
        return Options([(need, admission) for _, need, admission in ranked], exhausted, quota_reason)

    def admission(self, request: Request, need: Need) -> Admission | None:
        """The quota's answer, or None where the flavour has no quota tree (nothing is limited then)."""
        tree = self.trees.get(need.flavour or "")
        if tree is None or request.department_id not in tree.nodes:
            return None
        return admit(tree, request.department_id, need.charge_milli, interruptible=request.interruptible)

    def _place(self, request: Request, need: Need, admission: Admission | None) -> Reason | None:
        key = shape_key(request, need)
        known = self._hopeless.get(key)
        if known is not None:
            return known
        ends_at = None if request.duration_ms is None else self.now + request.duration_ms
        members = find(self.state, self.state.view(ends_at), request, need)
        if members is not None:
            self._book(request, need, admission, members, ends_at)
            return None
        if (
            self.state.holds
            and find(self.state, self.state.view(ends_at, holds=False), request, need) is not None
        ):
            return self._behind(request, ends_at, need)
        reason = place_reason(self.state, request, need, self.policy)
        self._hopeless[key] = reason
        return reason

    def _book(
        self,
        request: Request,
        need: Need,
        admission: Admission | None,
        members: tuple[Member, ...],
        ends_at: int | None,
    ) -> None:
        for member in members:
            self.state.take(member)
            self.state.spend_slack(member, ends_at)
        if admission is not None:
            self.trees[need.flavour or ""].add(
                request.department_id, need.charge_milli, interruptible=request.interruptible
            )
        if request.user_id is not None and request.user_id in self.users:
            limits = self.users[request.user_id]
            self.users[request.user_id] = UserRoom(limits.limit_milli, limits.used_milli + need.charge_milli)
        self.occupied.append(backfill.Occupied(members, ends_at))
        borrowed = min(need.charge_milli, admission.borrowed) if admission is not None else 0
        self.places.append(Place(request.id, need.flavour, need.charge_milli, borrowed, members, ends_at))

    def _promise(self, request: Request, need: Need) -> Reserve | None:
        if len(self.reserves) >= self.policy.max_reservations or need.flavour is None:
            return None
        opening = backfill.first_opening(
            self.nodes, self.occupied, request, need, self.now, self.policy.overdue_ms
        )
        if opening is None:
            return None
        reserve = Reserve(request.id, need.flavour, opening.at, opening.members)
        self.state.add_hold(request.id, opening.at, opening.members, opening.later)
        until = None if request.duration_ms is None else opening.at + request.duration_ms
        self.occupied.append(backfill.Occupied(opening.members, until))
        self.reserves.append(reserve)
        return reserve

    def _behind(self, request: Request, ends_at: int | None, need: Need) -> Reason:
        delaying = [hold for hold in self.state.holds if ends_at is None or ends_at > hold.start_at]
        figures = {
            "requests": [hold.request_id for hold in delaying],
            "reserved_from": min(hold.start_at for hold in delaying),
            "flavour": need.flavour,
        }
        return Reason("behind", figures, need.flavour)

    def _strictly_ahead(self, request: Request) -> int | None:
        if self.policy.queueing != "strict":
            return None
        found = (self._first_blocked.get(flavour) for flavour in request.flavours)
        return next((one for one in found if one is not None), None)

    def _window(self, request: Request, start_at: int) -> Blocked:
        """A request that is to start later: its places are kept from then on against all that stand behind
        it.

        The quota is judged when it starts. ``kept`` False: nothing is promised (yet), it competes then.
        """
        reserve: Reserve | None = None
        if start_at - self.now <= self.policy.windows_ahead_ms:
            for code in request.flavours:
                facts = self.facts.get(code)
                need = None if flavour_refusal(request, facts) else need_of(request, facts)
                if need is not None and (reserve := self._keep(request, need, start_at)) is not None:
                    break
        figures = {"start_at": start_at, "kept": reserve is not None}
        return Blocked(request, Reason("not_before", figures, next(iter(request.flavours), None)), reserve)

    def _keep(self, request: Request, need: Need, start_at: int) -> Reserve | None:
        floor = self.now + self.policy.overdue_ms
        opening = backfill.opening_at(self.nodes, self.occupied, request, need, start_at, floor)
        if opening is None or need.flavour is None:
            return None
        self.state.add_hold(request.id, start_at, opening.members, opening.later)
        until = None if request.duration_ms is None else start_at + request.duration_ms
        self.occupied.append(backfill.Occupied(opening.members, until, start_at))
        reserve = Reserve(request.id, need.flavour, start_at, opening.members)
        self.windows.append(reserve)
        return reserve

    def _over_user_limit(self, request: Request, need: Need) -> Reason | None:
        limits = self.users.get(request.user_id) if request.user_id is not None else None
        if limits is None or limits.used_milli + need.charge_milli <= limits.limit_milli:
            return None
        figures = {"limit": limits.limit_milli, "used": limits.used_milli, "requested": need.charge_milli}
        return Reason("user_limit", figures, need.flavour)

    def _open_ask(self, request: Request) -> bool:
        return self.policy.scarcity and not request.ranked and len(request.flavours) > 1

    def _tied_demand(self) -> dict[str, int]:
        demand: dict[str, int] = {}
        for request in self.snapshot.pending:
            if len(request.flavours) == 1:
                code = request.flavours[0]
                facts = self.facts.get(code)
                need = None if flavour_refusal(request, facts) else need_of(request, facts)
                demand[code] = demand.get(code, 0) + (need.charge_milli if need else 0)
        return demand


def _only_the_pool(tree: QuotaTree, admission: Admission) -> bool:
    """Whether nothing but the root's own sum (all there is) stands in the way: its check comes last."""
    blocking = admission.blocking
    return (
        blocking is not None
        and blocking.rule == "subtree_quota"
        and tree.nodes[blocking.level].parent is None
    )


def quota_blocked(flavour: str, admission: Admission) -> Reason:
    """The reason of an ask that a quota level refuses."""
    figures = {**(admission.as_blocking() or {}), "available": admission.available, "flavour": flavour}
    return Reason("quota_blocked", figures, flavour)


def shape_key(request: Request, need: Need) -> tuple[object, ...]:
    """All that decides where a request fits: equal keys fit in equal places."""
    return (
        need.flavour,
        request.shape,
        request.per_node,
        request.nodes,
        need.milli,
        need.share_mib,
        request.profile,
        request.cpu_milli,
        request.memory_mib,
        request.min_gpu_mib,
        request.nvlink,
        request.min_driver,
        request.min_cuda,
        request.site,
    )
