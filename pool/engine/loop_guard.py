"""What keeps evictions from going round: minimum run times, back-off, and no displacing in turn.

Minimum run     work is left alone for so long after its last start (department's value, else the policy's).
Back-off        work evicted often is left alone until ``evictable_after``; a request displaced often displaces
                nobody before ``evicts_after``. ``back_off_until`` says until when.
In turn         who was displaced by a department displaces its work only where that stands above what is its
                own (its guarantee against an owner, its fair share between borrowers) by a margin.
Why it settles  An owner's claim cannot be turned round: it stays within its guarantee, and only those above
                theirs give. Between borrowers the asking side stays within its share, and only those above
                theirs give; shares depend on what all want, not on who runs.
Source: BEHAVIOUR 5 (Loop guard); cases_preemption.json, kinds min_runtime and loop_guard.
"""

from __future__ import annotations

from pool.engine.model import Policy, Request, Running, Snapshot
from quotas.engine.contest import minimum_run
from quotas.engine.tree import QuotaTree


def back_off_until(evictions: int, policy: Policy, last_at: int) -> int:
    """Until when somebody evicted so often, last at that moment, displaces nobody: 0 = no back-off."""
    return last_at + policy.back_off_ms if evictions >= policy.evictions_back_off else 0


def may_displace(request: Request, now: int) -> bool:
    """Whether a request may displace anybody now."""
    return request.evicts_after <= now


class MinimumRuns:
    """Minimum run times of a snapshot, resolved over a quota tree, remembered per pair of departments."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: int) -> None:
        self.values, self.policy, self.now = snapshot.minimum_run, policy, now
        self._known: dict[tuple[int, int, bool], int] = {}

    def protects(self, one: Running, asking: int, tree: QuotaTree | None, *, reclaim: bool) -> bool:
        """Whether running work is left alone by a request of department ``asking``."""
        if one.evictable_after > self.now:
            return True
        minimum = self._minimum(one.department_id, asking, tree, reclaim)
        return minimum > 0 and one.started_at + minimum > self.now

    def _minimum(self, giving: int, asking: int, tree: QuotaTree | None, reclaim: bool) -> int:
        default = self.policy.min_run_reclaim_ms if reclaim else self.policy.min_run_preempt_ms
        if not self.values or tree is None:
            return default
        key = (giving, asking, reclaim)
        if key not in self._known:
            rows = self.values.items()
            self._known[key] = minimum_run(
                {node_id: node.parent for node_id, node in tree.nodes.items()},
                {node_id: row.reclaim_ms if reclaim else row.preempt_ms for node_id, row in rows},
                asking,
                giving,
                default,
                reclaim=reclaim,
            )
        return self._known[key]


def clear_of_turn(
    displaced_by: tuple[int, ...], department: object, used: int, own: float, margin: int
) -> bool:
    """Whether a request that these departments displaced may displace this one's work: only where it uses more
    than is its own by a margin (permille)."""
    return department not in displaced_by or used * 1000 > own * (1000 + margin)
