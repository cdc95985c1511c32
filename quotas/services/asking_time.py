"""When a request is to run: start, duration, deadline, a service's review date."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from portal.accounts.models import User
from portal.kernel.clock import now
from quotas.selectors.user_limits import limits_of
from quotas.services.reader import Reader

LONGEST_S = 366 * 86400
SHORTEST_S = 60
AHEAD = timedelta(days=366)
LATE = timedelta(minutes=5)
"""A start so little in the past is taken as now: forms are filled in slowly."""


def read_time(r: Reader, user: User, draft: bool) -> None:
    """Start, duration or review date, deadline; a recurring window brings its own start and length."""
    moment = now()
    start = r.moment("start_at")
    review = r.moment("review_at")
    deadline = r.moment("deadline_at")
    if start is not None and start < moment - LATE and not draft:
        r.wrong("start_at", _("This start lies in the past."))
    elif start is not None and start > moment + AHEAD:
        r.wrong("start_at", _("At most a year ahead."))
    if r.out["is_service"]:
        r.out["duration_s"], r.out["deadline_at"] = None, None
        _review(r, review, moment, draft)
        return
    r.out["review_at"] = None
    if r.values.get("window"):
        r.out["start_at"], r.out["deadline_at"], r.out["duration_s"] = None, None, None
        return
    length = r.whole("duration_s", None, SHORTEST_S, LONGEST_S)
    if length is None and not draft:
        r.wrong("duration_s", _("How long is it needed? Only a service has no end."))
    check_longest(r, "duration_s", length, user)
    if deadline is not None and length is not None:
        _deadline(r, deadline, max(moment, start or moment), length, draft)


def check_longest(r: Reader, name: str, length: int | None, user: User) -> None:
    """Refuse a length beyond the person's longest lease."""
    longest = limits_of(user.pk)["longest_lease_s"]
    if length is not None and longest is not None and length > longest:
        r.wrong(name, _("Longest lease here: {n} h.").format(n=f"{longest / 3600:g}"))


def _review(r: Reader, review: datetime | None, moment: datetime, draft: bool) -> None:
    if review is None and not draft:
        r.wrong("review_at", _("A service has no end but a review date: you renew it by then or it stops."))
    elif review is not None and not moment < review <= moment + AHEAD:
        r.wrong("review_at", _("A date within the next year is needed."))


def _deadline(r: Reader, deadline: datetime, start: datetime, length: int, draft: bool) -> None:
    """A deadline that cannot be met even if it began at once is refused now, with the sum."""
    earliest = start + timedelta(seconds=length)
    if deadline >= earliest or draft:
        return
    r.wrong(
        "deadline_at",
        _("It cannot be met: begun at {start}, {hours} h later it is {end}.").format(
            start=_clock(start), hours=f"{length / 3600:g}", end=_clock(earliest)
        ),
    )


def _clock(moment: datetime) -> str:
    return date_format(timezone.localtime(moment), "Y-m-d H:i")
