"""The queues of approvers: what waits for whom, with what is needed to decide it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Q, QuerySet

from portal.accounts.models import Role
from portal.accounts.policy import Policy
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders, May
from quotas.selectors.requests import decides_scope

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


def visible_steps(policy: Policy) -> QuerySet[ApprovalStep]:
    """Steps of requests and changes that the person reads, decides, or made."""
    scope = policy.reads | decides_scope(policy)
    return (
        ApprovalStep.objects.filter(
            scope.q("request__department_id")
            | scope.q("quota_change__department_id")
            | scope.q("quota_change__lender_id")
            | Q(requester=policy.user)
        )
        .select_related(
            "department",
            "requester",
            "decided_by",
            "on_behalf_of",
            "request__flavour",
            "request__department",
            "request__requester",
            "quota_change__flavour",
            "quota_change__department",
            "quota_change__requester",
            "quota_change__lender",
        )
        .order_by("due_at", "id")
    )


def subject_of(step: ApprovalStep) -> CapacityRequest | QuotaChange:
    """The request or quota change of a step."""
    subject = step.request or step.quota_change
    assert subject is not None
    return subject


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


def page_rows(policy: Policy) -> list[QueueRow]:
    """All open steps that the person sees (the ``MOST`` that are due first), read once per page."""
    kept: list[QueueRow] | None = getattr(policy, "kept_open_rows", None)
    if kept is None:
        steps = list(open_steps(policy)[:MOST])
        kept = open_rows(policy, Deciders.of_page(policy), steps) if steps else []
        policy.kept_open_rows = kept  # type: ignore[attr-defined]
    return kept


def waiting_for(user_id: int, policy: Policy) -> int:
    """How many open steps wait for this person: the figure beside the navigation entry."""
    if not (policy.has(Role.LEAD, Role.POOL_ADMIN, Role.FINANCE) or decides_scope(policy)):
        return 0
    return sum(1 for row in page_rows(policy) if row.mine and row.subject.state == "in_approval")


def decided_steps(policy: Policy) -> QuerySet[ApprovalStep]:
    """What was decided, newest first."""
    return (
        visible_steps(policy)
        .filter(state__in=[State.APPROVED, State.RETURNED, State.REJECTED])
        .order_by("-decided_at", "-id")
    )
