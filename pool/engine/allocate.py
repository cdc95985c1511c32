"""The allocate action: walk the line once, place what may start, promise places to what is blocked, say why.

Rule: in the order of the line each request takes the best place that is free, if quota, personal limit and
promises to others allow; what fits is never turned away, and nobody who can start waits for one who cannot
(unless queueing is strict). Source: BEHAVIOUR 5 (Admission, Placement).

Free space and quota only shrink during the walk. So what is blocked stays blocked, and all requests of one
kind (same department, same demand) are judged once: a line of thousands costs what its kinds cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pool.engine import backfill
from pool.engine.fit import Need
from pool.engine.model import Kept, Member, Place, Request, Reserve
from pool.engine.reasons import Reason, flavour_reason, place_reason, quota_blocked
from pool.engine.round import Blocked, Placed, Round
from pool.engine.state import View
from pool.engine.world import Known, is_elastic, smallest
from quotas.engine.available import LevelCheck, borrowed, refusal
from quotas.engine.flavours import Mode, rank_modes
from quotas.engine.tree import QuotaTree

NEVER = frozenset({"larger_than_any_node", "too_few_nodes", "model_absent"})
"""Reasons that no release of running work can change: such a request stops nobody."""
OWN_LIMITS = ("user_limit", "running_limit")
"""Reasons that lie with the person alone: others pass."""
MAINTENANCE = -1
"""Whose hold it is where a node is to be closed: no request has this id."""
WITHOUT_GPU = Need(None, 0, 0, 0)


class Refusal(NamedTuple):
    """What a quota level says, with what would pass now: made a reason of where somebody is told."""

    flavour: str
    check: LevelCheck
    room: int

    def reason(self) -> Reason:
        return quota_blocked(*self)


class Options(NamedTuple):
    """What a request may be charged as: ``usable`` in the order to try, flavours that are equally welcome
    together; ``refused`` the first flavour whose quota says no; ``exhausted`` whether only the sum of the whole
    pool does; ``refusal`` the first reason why a flavour is not usable."""

    usable: list[list[Need]]
    refused: Need | None = None
    exhausted: bool = False
    refusal: Reason | Refusal | None = None

    def why(self) -> Reason | None:
        """The reason in words' stead, where one is wanted."""
        return self.refusal.reason() if isinstance(self.refusal, Refusal) else self.refusal


@dataclass(slots=True)
class _Kind:
    """What is known of a kind of request that was blocked: it stays so for all that run at least as long.
    ``promised``: one of it got a promise, so the next may."""

    ends_at: int
    reason: Reason
    lacks: Need | None
    promised: bool


class Allocate:
    """One walk. ``run`` is called once per request in line order; the results are in the round."""

    def __init__(self, round_: Round) -> None:
        self.round, self.world, self.policy, self.now = round_, round_.world, round_.policy, round_.now
        self._hopeless: dict[int, Reason] = {}
        """Why no place is free, by spot (``World.spot``)."""
        self._stuck: dict[int, _Kind] = {}
        self._room_seen: dict[int, int] = {}
        self._only_behind: dict[int, tuple[int, View]] = {}
        """Spots that fit but for promises, as of a state and what may be used: so do others of the sort then."""
        self._unpromised: set[tuple[int, int | None]] = set()
        self._first_blocked: dict[str, int] = {}
        self._strict = self.policy.queueing == "strict"

    def run(self, request: Request) -> None:
        """Place the request, or note why it waits."""
        if request.start_at is not None and request.start_at > self.now:
            self.round.blocked.append(self._window(request, request.start_at))
            return
        kept = self.round.keeps.get(request.id) if self.round.keeps else None
        if kept is not None and _enough(request, kept.members):
            self._judge_kept(request, kept)
            return
        if kept is not None:
            self.round.let_go(request)
        known = self.world.known(request)
        kind = self._stuck.get(known.kind)
        if kind is not None and not (kind.promised and self._promises_left()):
            ends_at = self._ends_at(request)
            if ends_at is None or ends_at >= kind.ends_at:
                self.round.blocked.append(Blocked(request, kind.reason, None, kind.lacks))
                return
        ahead = self._strictly_ahead(request) if self._strict else None
        if ahead is not None:
            strict = Reason("behind", {"requests": [ahead], "strict": True}, request.flavours[0])
            self._block(known, strict, None, None)
            return
        self._judge(known)

    def is_stuck(self, request: Request) -> bool:
        """Whether a request is of a kind that is blocked for good in this walk: nothing more needs be said."""
        kind = self._stuck.get(self.world.known(request).kind)
        if kind is None or kind.promised or request.id in self.round.keeps:
            return False
        if request.start_at is not None and request.start_at > self.now:
            return False
        ends_at = self._ends_at(request)
        return ends_at is None or ends_at >= kind.ends_at

    def pass_over(self, request: Request) -> None:
        """A request that is known to be blocked: in a strict queue it still stands before the others."""
        if request.start_at is None or request.start_at <= self.now:
            for flavour in request.flavours:
                self._first_blocked.setdefault(flavour, request.id)

    def _judge(self, known: Known) -> None:
        options = self.options(known)
        first: Reason | None = None
        for needs in options.usable:
            reason = self._place(known, needs)
            if reason is None:
                return
            first = first or reason
        if first is not None:
            lacks = options.usable[0][0]
            self._block(known, first, self._promise(known, lacks), lacks)
        else:
            self._block_by_quota(known, options)

    def _block_by_quota(self, known: Known, options: Options) -> None:
        """No flavour may be charged. Where only the whole pool's sum is in the way and its cards are in use
        indeed, the request waits for cards, with a promise as for every other that is blocked so."""
        lacks = options.refused
        if options.exhausted and lacks is not None:
            cards = self._no_place(known, lacks)
            if cards is not None:
                self._block(known, cards, self._promise(known, lacks), lacks)
                return
        reason = options.why()
        assert reason is not None
        self._block(known, reason, None, lacks)

    def _block(self, known: Known, reason: Reason, reserve: Reserve | None, lacks: Need | None) -> None:
        request = known.request
        if reason.code in NEVER:
            lacks = None
        self.round.blocked.append(Blocked(request, reason, reserve, lacks))
        if self._strict and lacks is not None and reason.code not in ("quota_blocked", *OWN_LIMITS):
            for flavour in request.flavours:
                self._first_blocked.setdefault(flavour, request.id)
        if reason.code not in OWN_LIMITS and not (self._strict and "strict" in reason.figures):
            ends_at = self._ends_at(request)
            until = backfill.NEVER if ends_at is None else ends_at
            kind = self._stuck.get(known.kind)
            if kind is None or until < kind.ends_at:
                self._stuck[known.kind] = _Kind(until, reason, lacks, reserve is not None)

    def _ends_at(self, request: Request) -> int | None:
        return None if request.duration_ms is None else self.now + request.duration_ms

    # Quota

    def options(self, known: Known) -> Options:
        """The flavours that may be charged now, in the order to try them, or why there is none."""
        request = known.request
        if request.shape == "cpu" and not request.parts:
            return self._without_gpu(request)
        if len(request.flavours) == 1:
            return self._only_option(known, request.flavours[0])
        ranked: dict[tuple[int, int], list[Need]] = {}
        why: Reason | Refusal | None = None
        refused: Need | None = None
        exhausted = possible = False
        for index, code in enumerate(request.flavours):
            need = self.world.need(request, code)
            if need is None or code not in self.world.state.by_flavour:
                continue
            possible = True
            least = smallest(request, need, self.world)[1]
            limited = self._over_user_limit(request, least)
            if limited is not None:
                why = why or limited
                continue
            if not self.world.fits_quota(request, least):
                if refused is None:
                    tree, over = self._refusing(request, least)
                    refused, exhausted = need, _only_the_pool(tree, over.check)
                    why = why or over
                continue
            ranked.setdefault(self._rank(request, need, index), []).append(need)
        if not possible:
            return Options([], refusal=flavour_reason(request, self.world.facts))
        return Options([ranked[rank] for rank in sorted(ranked)], refused, exhausted, why)

    def _only_option(self, known: Known, code: str) -> Options:
        """The same for a request that names one flavour, as most do: nothing to rank."""
        request, world = known.request, self.world
        need = world.need_of(known, code)
        if need is None or code not in world.state.by_flavour:
            return Options([], refusal=flavour_reason(request, world.facts))
        least = need if request.min_nodes is None else smallest(request, need, world)[1]
        limited = self._over_user_limit(request, least) if self.round.users else None
        if limited is not None:
            return Options([], refusal=limited)
        if world.fits_quota(request, least):
            return Options([[need]])
        tree, over = self._refusing(request, least)
        return Options([], need, _only_the_pool(tree, over.check), over)

    def _without_gpu(self, request: Request) -> Options:
        if self.world.fits_quota(request, WITHOUT_GPU):
            return Options([[WITHOUT_GPU]])
        return Options([], refusal=self._refusing(request, WITHOUT_GPU)[1])

    def _rank(self, request: Request, need: Need, index: int) -> tuple[int, int]:
        """Flavours within the guarantee before borrowed ones; then as ranked, or all alike for an open ask."""
        tree = self.world.trees.get(need.flavour or "")
        above = 0
        if tree is not None and request.department_id in tree.nodes:
            above = borrowed(tree, request.department_id, need.charge_milli)
        mode: Mode = "borrow" if above else "fit"
        rank = rank_modes(self.policy.flavour.preference, mode)
        if mode == "borrow" and self.policy.flavour.when_can_borrow == "stop":
            rank = 0
        return rank, index if request.ranked else 0

    def _refusing(self, request: Request, need: Need) -> tuple[QuotaTree, Refusal]:
        """The first quota tree that refuses, and what its level says."""
        for code, amount in self.world.charges(request, need):
            tree = self.world.trees.get(code)
            if tree is None or request.department_id not in tree.nodes or amount <= 0:
                continue
            check = refusal(tree, request.department_id, amount, interruptible=request.interruptible)
            if check is not None:
                room = self.world.room(request.department_id, code, interruptible=request.interruptible)
                return tree, Refusal(code, check, room or 0)
        raise ValueError("no quota refuses")

    def _over_user_limit(self, request: Request, need: Need) -> Reason | None:
        users = self.round.users
        limits = users.get(request.user_id) if users and request.user_id is not None else None
        if limits is None:
            return None
        if limits.limit_runs is not None and limits.runs + 1 > limits.limit_runs:
            figures = {"limit": limits.limit_runs, "used": limits.runs, "requested": 1}
            return Reason("running_limit", figures, need.flavour)
        if limits.limit_milli is None or limits.used_milli + need.charge_milli <= limits.limit_milli:
            return None
        figures = {"limit": limits.limit_milli, "used": limits.used_milli, "requested": need.charge_milli}
        return Reason("user_limit", figures, need.flavour)

    # Places

    def _place(self, known: Known, needs: Sequence[Need]) -> Reason | None:
        """Start the request on the best of flavours that are equally welcome; the reason where it cannot."""
        request, spot = known.request, self.world.spot
        open_ = [need for need in needs if spot(known, need.flavour) not in self._hopeless]
        if not open_:
            return self._hopeless[spot(known, needs[0].flavour)]
        ends_at = self._ends_at(request)
        view, mark = self.world.state.view(ends_at), self.world.state.mark()
        behind = self._only_behind.get(spot(known, open_[0].flavour)) if len(open_) == 1 else None
        if behind is not None and behind[0] == mark and behind[1] is view and not is_elastic(request):
            return self._behind(request, ends_at, open_[0])
        size, amounts = self._size(self._keep_apart(request), open_)
        found = self.world.find_among(size, amounts, view, scarcity=self.policy.scarcity)
        if found is not None:
            self.book(request, self._of_size(request, found.need, len(found.members)), found.members, ends_at)
            return None
        if self.world.state.holds:
            everything = self.world.state.view(ends_at, holds=False)
            found = self.world.find_among(size, amounts, everything, scarcity=False)
            if found is not None:
                self._only_behind[spot(known, found.need.flavour)] = (mark, view)
                return self._behind(request, ends_at, found.need)
        reasons = [self._no_place(known, need, sought=True) for need in open_]
        return reasons[0]

    def _keep_apart(self, request: Request) -> Request:
        """The request with the nodes on which others of its group stand: those of work that runs, and of what
        this round places."""
        if request.apart is None:
            return request
        nodes = {
            member.node_id
            for one in self.world.running.values()
            if one.apart == request.apart
            for member in one.members
        }
        placed = (one.place for one in self.round.placed if one.request.apart == request.apart)
        nodes |= {member.node_id for place in placed for member in place.members}
        return replace(request, avoid=frozenset(nodes))

    def _no_place(self, known: Known, need: Need, *, sought: bool = False) -> Reason | None:
        """Why no place is free for a kind of request, promises aside; None where one is."""
        spot = self.world.spot(known, need.flavour)
        reason = self._hopeless.get(spot)
        if reason is None:
            request = known.request
            view = self.world.state.view(None, holds=False)
            if not sought:
                # Nothing was booked since a place was seen for one of this sort: it is there still.
                mark = self.world.state.mark()
                if self._room_seen.get(spot) == mark:
                    return None
                if self.world.find(request, need, view) is not None:
                    self._room_seen[spot] = mark
                    return None
            if self.round.explain:
                reason = place_reason(self.world.state, *smallest(request, need, self.world), self.policy)
            else:
                reason = Reason("no_node_fits", {}, need.flavour)
            self._hopeless[spot] = reason
        return reason

    def _size(self, request: Request, needs: Sequence[Need]) -> tuple[Request, Sequence[Need]]:
        """The request as large as quota and personal limit let an elastic one start."""
        if not is_elastic(request):
            return request, needs
        for nodes in range(request.nodes, max(1, request.min_nodes or 1) - 1, -1):
            size = replace(request, nodes=nodes)
            amounts = [self._of_size(request, need, nodes) for need in needs]
            if all(
                self.world.fits_quota(size, one) and self._over_user_limit(request, one) is None
                for one in amounts
            ):
                return size, amounts
        return request, needs

    def _of_size(self, request: Request, need: Need, nodes: int) -> Need:
        """The need of a gang that starts with so many nodes."""
        if not is_elastic(request) or nodes == request.nodes:
            return need
        return self.world.need(replace(request, nodes=nodes), need.flavour or "") or need

    def _judge_kept(self, request: Request, kept: Kept) -> None:
        """A request for which places are kept starts on them once they are free, and waits for that."""
        if self._from_kept(request, kept.members):
            return
        flavour = self._flavour_of(request, kept.members)
        waits = Reason("making_room", {"flavour": flavour, "evicts": 0, "until": kept.until}, flavour)
        reason = self.round.made_room.get(request.id, waits)
        self.round.blocked.append(Blocked(request, reason, None))

    def _from_kept(self, request: Request, members: tuple[Member, ...]) -> bool:
        """Start on the places kept for it, if all of them are free and quota allows."""
        kept = self.round.let_go(request)
        flavour = self._flavour_of(request, members)
        need = self.world.need(request, flavour) if flavour is not None else None
        if need is not None and all(self.world.is_free(take) for m in members for take in m.takes):
            charge = sum(take.charge_milli for member in members for take in member.takes)
            need = replace(need, charge_milli=charge)
            if self.world.fits_quota(request, need) and self._over_user_limit(request, need) is None:
                self.book(request, need, members, self._ends_at(request))
                return True
        self.round.hold(request, kept)
        return False

    def _flavour_of(self, request: Request, members: Iterable[Member]) -> str | None:
        for member in members:
            for take in member.takes:
                card = self.world.state.gpus.get(take.gpu_id)
                if card is not None and card.gpu.flavour in request.flavours:
                    return card.gpu.flavour
        return None

    def book(self, request: Request, need: Need, members: tuple[Member, ...], ends_at: int | None) -> None:
        """Start a request on free places."""
        tree = self.world.trees.get(need.flavour or "")
        above = 0
        if tree is not None and request.department_id in tree.nodes:
            above = min(need.charge_milli, borrowed(tree, request.department_id, need.charge_milli))
        self.world.take(request, need, members)
        for member in members:
            self.world.state.spend_slack(member, ends_at)
        if request.user_id is not None and request.user_id in self.round.users:
            limits = self.round.users[request.user_id]
            self.round.users[request.user_id] = replace(
                limits, used_milli=limits.used_milli + need.charge_milli, runs=limits.runs + 1
            )
        place = Place(request.id, need.flavour, need.charge_milli, above, members, ends_at)
        self.round.add(Placed(request, need, place))

    # Promises

    def _promises_left(self) -> bool:
        return len(self.round.reserves) < self.policy.max_reservations

    def _promise(self, known: Known, need: Need) -> Reserve | None:
        if need.flavour is None or not self._promises_left():
            return None
        request = known.request
        key = (self.world.spot(known, need.flavour), request.duration_ms if self.round.windows else None)
        if key in self._unpromised or not self.round.has_ends():
            return None
        opening = self._horizon().first_opening(request, need)
        if opening is None:
            self._unpromised.add(key)
            return None
        reserve = Reserve(request.id, need.flavour, opening.at, opening.members)
        self.world.state.add_hold(request.id, opening.at, opening.members, opening.later)
        until = None if request.duration_ms is None else opening.at + request.duration_ms
        self.round.occupancy.add(backfill.Occupied(opening.members, until, promise=True))
        self.round.reserves.append(reserve)
        return reserve

    def _horizon(self) -> backfill.Horizon:
        floor = self.now + self.policy.overdue_ms
        return backfill.Horizon(self.world.state, self.world.nodes, self.round.occupancy, floor)

    def _behind(self, request: Request, ends_at: int | None, need: Need) -> Reason:
        delaying = [hold for hold in self.world.state.holds if ends_at is None or ends_at > hold.start_at]
        if all(hold.request_id == MAINTENANCE for hold in delaying):
            begins = {"closed_from": min(hold.start_at for hold in delaying), "flavour": need.flavour}
            return Reason("closed_soon", begins, need.flavour)
        figures = {
            "requests": [hold.request_id for hold in delaying if hold.request_id != MAINTENANCE],
            "reserved_from": min(hold.start_at for hold in delaying),
            "flavour": need.flavour,
        }
        return Reason("behind", figures, need.flavour)

    def _strictly_ahead(self, request: Request) -> int | None:
        found = (self._first_blocked.get(flavour) for flavour in request.flavours)
        return next((one for one in found if one is not None), None)

    def _window(self, request: Request, start_at: int) -> Blocked:
        """A request that is to start later: its places are kept from then on against all that stand behind
        it.

        The quota is judged when it starts. ``kept`` False: nothing is promised (yet), it competes then. Shortly
        before, what it may take back is taken, so that borrowers are gone when it begins.
        """
        reserve: Reserve | None = None
        if start_at - self.now <= self.policy.windows_ahead_ms:
            for code in request.flavours:
                need = self.world.need(request, code)
                if need is not None and (reserve := self._keep_window(request, need, start_at)) is not None:
                    break
        figures = {"start_at": start_at, "kept": reserve is not None}
        reason = Reason("not_before", figures, next(iter(request.flavours), None))
        if reserve is not None or start_at - self.now > self.policy.window_lead_ms:
            return Blocked(request, reason, reserve)
        options = self.options(self.world.known(request))
        return Blocked(request, reason, None, options.usable[0][0] if options.usable else options.refused)

    def _keep_window(self, request: Request, need: Need, start_at: int) -> Reserve | None:
        opening = self._horizon().opening_at(request, need, start_at)
        if opening is None or need.flavour is None:
            return None
        self.world.state.add_hold(request.id, start_at, opening.members, opening.later)
        until = None if request.duration_ms is None else start_at + request.duration_ms
        self.round.occupancy.add(backfill.Occupied(opening.members, until, start_at, promise=True))
        reserve = Reserve(request.id, need.flavour, start_at, opening.members)
        self.round.windows.append(reserve)
        return reserve


def _enough(request: Request, members: Sequence[Member]) -> bool:
    """Whether so many members are what a request starts with: it may have been changed since they were kept."""
    if request.parts:
        return len(members) == sum(part.nodes for part in request.parts)
    least = request.nodes if request.min_nodes is None else max(1, request.min_nodes)
    cards = request.per_node if request.shape != "cpu" else 0
    return least <= len(members) <= request.nodes and all(len(one.takes) == cards for one in members)


def _only_the_pool(tree: QuotaTree, check: LevelCheck) -> bool:
    """Whether nothing but the root's own sum (all there is) stands in the way: its check comes last."""
    return check.rule == "subtree_quota" and tree.nodes[check.level].parent is None
