"""Keep reports: freeze one, save its question under a name, send the saved ones when they are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext_lazy as _

from monitoring.models import ReportRun, SavedReport
from monitoring.selectors.reports.base import PARAMS, Ask, Kind, ask_from
from monitoring.selectors.reports.frozen import content_of
from monitoring.selectors.reports.kinds import kind_of
from portal.accounts.models import User
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError, Invalid, NotFound
from portal.notify.services import notify
from portal.ops.actor import Actor
from portal.ops.services import audit_record
from quotas.engine.billing import day_start, local_day
from quotas.selectors.billing_time import billing_zone, first_of_month, next_month
from quotas.selectors.running import one_look

LOOK = ("sort", "hide")
"""How a report's table is shown: kept with a saved question, of no account for its figures."""

SEND_AT = timedelta(hours=3)
"""So long after local midnight scheduled reports are sent: the day before is booked and summed then."""


def may_read(kind: Kind, policy: Policy) -> None:
    """Reports of the pool as a whole are for those who read everything; the others show each reader their own."""
    if kind.pool_only:
        policy.require(policy.reads_money.everything)


def clean_params(params: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, str]:
    """Only what reports know, without what is empty. `more`: what a saved question keeps of its look."""
    return {name: str(params[name])[:500] for name in (*PARAMS, *more) if params.get(name)}


def report_run(*, acting_user: Actor, kind: Kind, ask: Ask, saved: SavedReport | None = None) -> ReportRun:
    """Make a report and keep it as it is now: its exact days, its figures, the ledger's mark.

    In the active language. All figures are of one moment. Refused where the reader may not see it.
    """
    may_read(kind, ask.policy)
    with one_look():
        answer = kind.make(ask)
        content = content_of(kind, ask, answer)
    params = {**_params_of(ask), "by": ask.by}
    with transaction.atomic():
        run = ReportRun.objects.create(
            kind=kind.code,
            params=params,
            owner=acting_user.user,
            saved=saved,
            language=content.language,
            ledger_mark=content.mark,
            made_at=content.made_at,
            departments=ask.departments(),
            content=content.as_json(),
        )
        audit_record(
            acting_user=acting_user,
            action="report.run",
            subject=run,
            after={"kind": kind.code, **params, "ledger_mark": content.mark},
        )
        return run


def _params_of(ask: Ask) -> dict[str, str]:
    chosen = ask.chosen
    params = ask.period.params()
    if chosen.department_id is not None:
        params["department"] = str(ask.policy.tree.rows[chosen.department_id].uid)
    if chosen.flavour is not None:
        params["flavour"] = chosen.flavour.code
    if chosen.user is not None:
        params["user"] = str(chosen.user.uid)
    if chosen.site:
        params["site"] = chosen.site
    return params


def report_save(
    *,
    acting_user: Actor,
    policy: Policy,
    kind: Kind,
    name: str,
    params: Mapping[str, Any],
    shared: bool = False,
    every: str = "",
    receivers: Sequence[User] = (),
) -> SavedReport:
    """Keep a question under a name. Shared and sent only by those who read money beyond their own.

    Each reader and receiver sees it with their own rights. Invalid for an empty name or a question that cannot be
    asked, Conflict for a name that is taken.
    """
    may_read(kind, policy)
    wanted = clean_params(params, LOOK)
    ask_from(kind, wanted, policy)
    name = name.strip()
    if not name:
        raise Invalid.field("name", _("Give it a name."))
    if every not in SavedReport.Every.values:
        raise Invalid.field("every", _("Known times: day, week, month."))
    if shared or every:
        policy.require(policy.reads_money)
    try:
        with transaction.atomic():
            saved = SavedReport.objects.create(
                name=name[:120],
                kind=kind.code,
                params=wanted,
                owner=acting_user.user,
                shared=shared,
                every=every,
                next_at=next_time(every, now()),
            )
            people = list(receivers)
            if every and not people and acting_user.user is not None:
                people = [acting_user.user]
            saved.receivers.set(people)
            audit_record(
                acting_user=acting_user,
                action="report.saved",
                subject=saved,
                after={"name": saved.name, "kind": kind.code, "shared": shared, "every": every, **wanted},
            )
            return saved
    except IntegrityError as error:
        raise Conflict(
            code="name_taken", detail=_("You have a saved report of this name already.")
        ) from error


def report_forget(*, acting_user: Actor, saved: SavedReport) -> None:
    """Take a saved report away; its runs stay. Only its owner may. A second time changes nothing."""
    if saved.owner_id != getattr(acting_user.user, "pk", None):
        raise NotFound(code="not_found", detail=_("There is no such report."))
    with transaction.atomic():
        changed = SavedReport.objects.filter(pk=saved.pk, removed_at=None).update(
            removed_at=now(), every="", next_at=None, updated_at=now()
        )
        if changed:
            audit_record(
                acting_user=acting_user, action="report.forgotten", subject=saved, before={"name": saved.name}
            )


def next_time(every: str, after: datetime) -> datetime | None:
    """The next moment at which a schedule is due, in the billing zone; None for one that never is."""
    if not every:
        return None
    zone = billing_zone()
    today = local_day(after, zone)
    for n in range(40):
        day = today + timedelta(days=n)
        at = day_start(day, zone) + SEND_AT
        fits = (
            every == "day" or (every == "week" and day.weekday() == 0) or (every == "month" and day.day == 1)
        )
        if fits and at > after:
            return at
    raise AssertionError("a month has a first day")


def reports_send() -> int:
    """Run the saved reports that are due, for each receiver with their rights and in their language; returns notices.

    A schedule moves on before its report is made, so that a report that fails is not tried for ever; what was missed
    while nothing ran is sent once.
    """
    sent = 0
    for pk in SavedReport.objects.filter(removed_at=None, next_at__lte=now()).values_list("pk", flat=True):
        with transaction.atomic():
            saved = (
                SavedReport.objects.select_for_update(skip_locked=True)
                .filter(pk=pk, removed_at=None, next_at__lte=now())
                .first()
            )
            if saved is None:
                continue
            due = saved.next_at
            saved.next_at = next_time(saved.every, now())
            saved.save(update_fields=["next_at", "updated_at"])
        for person in saved.receivers.filter(is_active=True):
            sent += _send(saved, person, due)
    return sent


def _send(saved: SavedReport, person: User, due: datetime | None) -> int:
    """A run of the last whole period for one person, and the notice that it is there."""
    kind = kind_of(saved.kind)
    with translation.override(person.language or translation.get_language()):
        policy = policy_of(person)
        try:
            ask = ask_from(kind, {**saved.params, **_last_period(saved.every)}, policy)
            run = report_run(acting_user=Actor(user=person), kind=kind, ask=ask, saved=saved)
        except DomainError:
            return 0  # the receiver may no longer see what it asks for
    return len(
        notify(
            user_ids=[person.pk],
            kind="report_ready",
            subject=run,
            params={"name": saved.name, "ref": run.ref},
            url=reverse("monitoring:report-run", args=[run.uid]),
            threshold=due.isoformat() if due else "",
        )
    )


def _last_period(every: str) -> dict[str, str]:
    """The days that a schedule reports on: the day, week or month that just ended."""
    today = local_day(now(), billing_zone())
    if every == "month":
        first = first_of_month(first_of_month(today) - timedelta(days=1))
        return {"period": f"{first:%Y-%m}"} if next_month(first) <= today else {}
    length = 7 if every == "week" else 1
    return {
        "period": "days",
        "from": (today - timedelta(days=length)).isoformat(),
        "to": (today - timedelta(days=1)).isoformat(),
    }
