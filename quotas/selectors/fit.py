"""Does an ask fit? One judgement for the form's panel, for submission and for approvers.

For each flavour that may serve it: the charge, the cost, what the quota tree says at every level, what is
free now, and whether it could ever start. Four queries for any number of flavours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from portal.accounts.policy import DepartmentTree
from portal.kernel.units import MS_PER_SECOND, cost_micro
from quotas.engine import approval
from quotas.engine.available import Admission, LevelCheck, admit, cap_checks
from quotas.engine.charge import ChargeError
from quotas.engine.tree import Counters, QuotaTree
from quotas.models import GpuFlavour
from quotas.selectors.prices import rates_now
from quotas.selectors.shapes import AskShape
from quotas.selectors.trees import INSTALLATION, quota_trees


@dataclass(slots=True)
class Option:
    """One flavour for one ask. Amounts in milli-GPU, money in micro; ``never`` is the rule by which it could
    not even start in an empty pool.
    """

    flavour: GpuFlavour
    charge: int
    tree: QuotaTree
    admission: Admission
    never: LevelCheck | None
    rate_micro: int | None
    cost_micro: int | None
    used: int
    guaranteed: int
    limit: int | None
    over_guarantee: bool
    over_cap: LevelCheck | None
    installed: int
    healthy: int
    free: int
    largest_node: int

    @property
    def too_big(self) -> bool:
        """More than exists of this flavour."""
        return self.charge > self.installed

    @property
    def borrowed_part(self) -> int:
        """How much of the ask lies above the department's guarantee."""
        return max(0, min(self.charge, self.used + self.charge - self.guaranteed))


@dataclass(slots=True)
class Verdict:
    """All options in the order in which they would be tried, and who must agree."""

    options: list[Option]
    asks: list[approval.Ask] = field(default_factory=list)
    plan: approval.ApprovalPlan | None = None
    dearest: approval.Ask | None = None

    @property
    def best(self) -> Option | None:
        """The option that would be taken now."""
        return self.options[0] if self.options else None


def assess(
    *,
    department_id: int,
    flavours: Sequence[GpuFlavour],
    shape: AskShape,
    duration_s: int | None,
    interruptible: bool,
    moment: datetime,
    site_code: str = "",
    parents: Mapping[int, int | None] | None = None,
    smallest: AskShape | None = None,
) -> list[Option]:
    """Judge every flavour that can give the shape; the order is: fits the quota, within the guarantee,
    cheaper, display order. Flavours whose cards cannot give the shape are left out. ``smallest`` is the part of
    it that has to fit at once, where it may start with less: whether it could ever start is judged by that.
    """
    trees = quota_trees([flavour.pk for flavour in flavours], parents)
    rates = rates_now(
        [flavour.pk for flavour in flavours],
        at=moment,
        site_code=site_code,
        department_id=department_id,
        parents=parents,
    )
    out: list[Option] = []
    for flavour in flavours:
        try:
            charge = shape.charge(flavour)
            least = smallest.charge(flavour) if smallest is not None else charge
        except ChargeError:
            continue
        tree = trees[flavour.pk]
        out.append(_option(flavour, charge, least, tree, department_id, duration_s, interruptible, rates))
    out.sort(
        key=lambda o: (
            o.never is not None or o.too_big,
            not o.admission.fits,
            o.over_guarantee,
            o.cost_micro is None,
            o.cost_micro or 0,
        )
    )
    return out


def approval_asks(
    options: Sequence[Option],
    *,
    departments: tuple[str, ...],
    duration_s: int | None,
    work_class: str,
    interruptible: bool,
    nodes: int,
    at_once: int = 1,
) -> list[approval.Ask]:
    """What the approval rules look at, one a flavour; ``at_once``: members of an array that run together."""
    return [
        approval.Ask(
            amount_milli=o.charge * at_once,
            flavour=o.flavour.code,
            duration_ms=None if duration_s is None else duration_s * MS_PER_SECOND,
            cost_micro=o.cost_micro,
            over_guarantee=o.used + o.charge * at_once > o.guaranteed,
            over_cap=o.over_cap is not None,
            job_class=work_class,
            interruptible=interruptible,
            nodes=nodes,
            departments=departments,
        )
        for o in options
    ]


def level_name(level: object, names: Mapping[int, str], installation: str) -> str:
    """The name of a level of a check."""
    return installation if level == INSTALLATION else names.get(int(str(level)), str(level))


def department_codes(tree: DepartmentTree, department_id: int) -> tuple[str, ...]:
    """Codes of a department and its ancestors, for the approval rules."""
    return tuple(tree.rows[i].code for i in tree.ancestors(department_id))


def _option(
    flavour: GpuFlavour,
    charge: int,
    least: int,
    tree: QuotaTree,
    department_id: int,
    duration_s: int | None,
    interruptible: bool,
    rates: Mapping[int, int],
) -> Option:
    answer = admit(tree, department_id, charge, interruptible=interruptible)
    empty = tree.copy()
    empty.counters = {node: Counters() for node in tree.nodes}
    capacity = getattr(flavour, "capacity", None)
    installed = capacity.installed_milli if capacity is not None else 0
    healthy = capacity.healthy_milli if capacity is not None else 0
    counters = tree.counters[department_id]
    caps = [c for c in cap_checks(tree, department_id, charge, interruptible=True) if c.rule == "hard_cap"]
    rate = rates.get(flavour.pk)
    cost = None
    if rate is not None and duration_s is not None:
        cost = cost_micro(charge * duration_s, rate)  # milli-GPU × seconds = GPU-milliseconds
    guaranteed = tree.guarantee(department_id)
    return Option(
        flavour=flavour,
        charge=charge,
        tree=tree,
        admission=answer,
        never=admit(empty, department_id, least, interruptible=interruptible).blocking,
        rate_micro=rate,
        cost_micro=cost,
        used=counters.total,
        guaranteed=guaranteed,
        limit=limit_of(tree, department_id),
        over_guarantee=counters.total + charge > guaranteed,
        over_cap=next((c for c in caps if not c.holds), None),
        installed=installed,
        healthy=healthy,
        free=max(0, healthy - tree.counters[INSTALLATION].total),
        largest_node=capacity.largest_node_gpus if capacity is not None else 0,
    )


def limit_of(tree: QuotaTree, department_id: int) -> int | None:
    """Where a department's bar ends: the lower of hard cap and guarantee + borrow limit; None when
    unlimited.
    """
    node = tree.nodes[department_id]
    ends = [node.hard_cap]
    if node.borrow_limit is not None:
        ends.append(tree.guarantee(department_id) + node.borrow_limit)
    known = [end for end in ends if end is not None]
    return max(0, min(known)) if known else None
