"""The queues of approvers: what waits for whom, with what is needed to decide it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db.models import Q, QuerySet

from portal.accounts.models import Role
from portal.accounts.policy import Policy
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders, May, StepKey, SubjectKey
from quotas.selectors.requests import decides_scope
from quotas.selectors.shapes import FIELDS as SHAPE_FIELDS

State = ApprovalStep.State
MOST = 2000


@dataclass(slots=True)
class QueueRow:
    """One open step with its subject, who is asked first, and whether the reader may decide it (or why
    not).
    """

    step: ApprovalStep
    subject: CapacityRequest | QuotaChange
    may: May
    mine: bool
    first: list[str]


def _seen_by(policy: Policy) -> Q:
    scope = policy.reads | decides_scope(policy)
    if scope.everything:
        return Q()
    return (
        scope.q("request__department_id")
        | scope.q("quota_change__department_id")
        | scope.q("quota_change__lender_id")
        | Q(requester=policy.user)
    )


def visible_steps(policy: Policy) -> QuerySet[ApprovalStep]:
    """Steps of requests and changes that the person reads, decides, or made."""
    return (
        ApprovalStep.objects.filter(_seen_by(policy))
        .select_related(
            "department",
            "requester",
            "decided_by",
            "on_behalf_of",
            "request__flavour",
            "request__department",
            "quota_change__flavour",
            "quota_change__department",
            "quota_change__lender",
        )
        .order_by("due_at", "id")
    )


def subject_of(step: ApprovalStep) -> CapacityRequest | QuotaChange:
    """The request or quota change of a step; its requester is the step's, held by the database."""
    subject = step.request or step.quota_change
    assert subject is not None
    if subject.requester_id == step.requester_id and "requester" in step._state.fields_cache:
        subject.requester = step.requester
    return subject


ROW_FIELDS = (
    *("uid", "role", "department_id", "position", "due_at", "requester__display_name", "requester__username"),
    *(f"request__{name}" for name in SHAPE_FIELDS),
    *(
        f"request__{name}"
        for name in (
            *("uid", "state", "requester_id", "last_editor_id", "department_id", "options", "flavour__name"),
            *("array_count", "duration_s", "charge_milli", "cost_at_most_micro", "submitted_at"),
        )
    ),
    *(
        f"quota_change__{name}"
        for name in (
            *("uid", "state", "requester_id", "last_editor_id", "department_id", "created_at"),
            "flavour__name",
        )
    ),
)
"""What a line of the queue shows and judges by: a request has four times as many columns."""


def queue_steps(policy: Policy, pks: Sequence[int]) -> list[ApprovalStep]:
    """The steps of one page of the queue, in the order given; the reader sees them (``light_rows``). One query."""
    rows = ApprovalStep.objects.select_related("requester", "request__flavour", "quota_change__flavour").only(
        *ROW_FIELDS
    )
    found = {step.pk: step for step in rows.filter(pk__in=pks)}
    for step in found.values():
        subject = subject_of(step)
        subject.department = policy.tree.rows[subject.department_id]
    return [found[pk] for pk in pks if pk in found]


def open_rows(policy: Policy, deciders: Deciders, steps: Iterable[ApprovalStep]) -> list[QueueRow]:
    """Rows of open steps, in the order given."""
    user_id = policy.user.pk
    out: list[QueueRow] = []
    for step in steps:
        subject = subject_of(step)
        out.append(
            QueueRow(
                step,
                subject,
                deciders.may(user_id, step, subject),
                deciders.is_mine(user_id, step, subject),
                deciders.names_of(deciders.primary(step, subject)),
            )
        )
    return out


def open_steps(policy: Policy) -> QuerySet[ApprovalStep]:
    """Open steps that the person sees. A request that waits for its requester's consent is among them."""
    return visible_steps(policy).filter(state=State.OPEN)


@dataclass(frozen=True, slots=True)
class LightRow:
    """What the tabs of the queue need of an open step. ``state`` and ``cost_micro`` are those of the request (or
    change)."""

    pk: int
    is_change: bool
    state: str
    mine: bool
    may: May
    cost_micro: int


COLUMNS = (
    "pk",
    "role",
    "department_id",
    "requester_id",
    "request__last_editor_id",
    "request__department_id",
    "request__state",
    "request__cost_at_most_micro",
    "quota_change__last_editor_id",
    "quota_change__department_id",
    "quota_change__state",
)


def light_rows(policy: Policy) -> list[LightRow]:
    """All open steps that the person sees (the ``MOST`` that are due first), without their texts; once per
    page.
    """
    kept: list[LightRow] | None = getattr(policy, "kept_light_rows", None)
    if kept is not None:
        return kept
    rows = list(
        ApprovalStep.objects.filter(_seen_by(policy), state=State.OPEN)
        .order_by("due_at", "id")
        .values_list(*COLUMNS)[:MOST]
    )
    deciders = Deciders.of_page(policy) if rows else None
    user_id, kept = policy.user.pk, []
    for (
        pk,
        role,
        place,
        requester_id,
        editor,
        where,
        state,
        cost,
        change_editor,
        change_where,
        change_state,
    ) in rows:
        assert deciders is not None
        step = StepKey(role, place)
        is_change = where is None
        subject = SubjectKey(
            requester_id, change_editor if is_change else editor, change_where if is_change else where
        )
        mine, may = deciders.is_mine(user_id, step, subject), deciders.may(user_id, step, subject)
        kept.append(LightRow(pk, is_change, change_state if is_change else state, mine, may, cost or 0))
    policy.kept_light_rows = kept  # type: ignore[attr-defined]
    return kept


def waiting_for(user_id: int, policy: Policy) -> int:
    """How many open steps wait for this person: the figure beside the navigation entry."""
    if not (policy.has(Role.LEAD, Role.POOL_ADMIN, Role.FINANCE) or decides_scope(policy)):
        return 0
    return sum(1 for row in light_rows(policy) if row.mine and row.state == "in_approval")


def decided_steps(policy: Policy) -> QuerySet[ApprovalStep]:
    """What was decided, newest first."""
    return (
        visible_steps(policy)
        .filter(state__in=[State.APPROVED, State.RETURNED, State.REJECTED])
        .order_by("-decided_at", "-id")
    )
