"""The weekly digest: what was wasted in the week that ended, to each who reads departments, in the reader's words.

One notice a person and week, however often the task runs and also after a missed Monday. Who has nothing to read
about is not told.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime, timedelta

from django.db.models import Count, Sum
from django.urls import reverse

from monitoring.models import Finding, FindingDay
from monitoring.selectors.findings import findings_visible
from portal.accounts.models import Role, User
from portal.accounts.policy import DepartmentTree, Policy, policy_of
from portal.accounts.selectors.people import valid_bindings
from portal.kernel.clock import now
from portal.notify.services.notices import notify
from quotas.engine.billing import day_start, local_day
from quotas.selectors.billing_time import billing_zone

SENT_AT = timedelta(hours=8)
READERS = (Role.LEAD, Role.POOL_ADMIN, Role.FINANCE)
_WEEKS = uuid.UUID("2f6b2f0e-5d0e-5a53-9a3a-6d0f3f7c1c55")


def week_due(at: datetime) -> date | None:
    """The Monday of the week that ended last, from eight o'clock of its next Monday on (billing zone)."""
    zone = billing_zone()
    today = local_day(at, zone)
    monday = today - timedelta(days=today.weekday())
    if at < day_start(monday, zone) + SENT_AT:
        return None
    return monday - timedelta(days=7)


def week_sums(policy: Policy, first: date) -> dict[str, tuple[int, int, int]]:
    """Kind → (GPU-milliseconds, micro, findings) of the seven days from `first` that the reader sees."""
    seen = findings_visible(policy).exclude(state=Finding.State.DISMISSED)
    days = FindingDay.objects.filter(
        finding__in=seen, local_day__gte=first, local_day__lt=first + timedelta(days=7)
    )
    rows = days.values_list("finding__kind").annotate(
        Sum("gpu_ms"), Sum("micro"), Count("finding", distinct=True)
    )
    return {kind: (gpu_ms, micro, n) for kind, gpu_ms, micro, n in rows if gpu_ms}


def digest_send() -> int:
    """Send the digest that is due; returns the notices that are new."""
    first = week_due(now())
    if first is None:
        return 0
    year, week, _day = first.isocalendar()
    name = f"{year}-W{week:02d}"
    readers = valid_bindings().filter(role__in=READERS, user__is_active=True).values("user_id")
    tree = DepartmentTree.load()
    sent = 0
    for person in User.objects.filter(pk__in=readers).order_by("pk"):
        sums = week_sums(policy_of(person, tree), first)
        if not sums:
            continue
        told = notify(
            user_ids=[person.pk],
            kind="monitoring.waste_week",
            subject=("monitoring.wasteweek", uuid.uuid5(_WEEKS, name)),
            threshold=name,
            params={
                "first": first.isoformat(),
                "kinds": [[kind, *values] for kind, values in sorted(sums.items(), key=lambda kv: -kv[1][1])],
            },
            url=reverse("monitoring:waste"),
        )
        sent += len(told)
    return sent
