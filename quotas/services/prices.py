"""Set prices. A rate is never changed once it held: a new one cuts the one before it."""

from __future__ import annotations

from datetime import date, datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department
from portal.accounts.policy import DepartmentTree, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.units import cost_micro
from portal.ops.actor import Actor
from portal.ops.services import audit_record, incident_resolve
from quotas.models import GpuFlavour, LedgerEntry, PriceRate
from quotas.selectors.pool_names import site_problem
from quotas.services.books import books_for_booking
from quotas.services.ledger import correction_of

PRICED_LATE = "priced_late"
"""Reason code of corrections that give lines booked without a price their money."""

HIGHEST = 10**12
"""A million currency units per GPU-hour: more is a slip of the hand."""

LATE_BY = timedelta(minutes=2)
"""How far back "from now on" may reach, so that filling in a form does not fail."""


def rate_set(
    *,
    acting_user: Actor,
    flavour: GpuFlavour,
    micro_per_gpu_hour: int,
    valid_from: datetime,
    site_code: str = "",
    department: Department | None = None,
    list_micro_per_gpu_hour: int | None = None,
    power_micro_per_gpu_hour: int = 0,
    idle_micro_per_gpu_hour: int = 0,
    book: str = "",
    reason: str = "",
) -> PriceRate:
    """Put a rate in force from a moment until the next one of the same flavour, site and department that is set
    already. Without a department it is the general one.

    The rate that holds at that moment ends there. A moment in the past is taken only where nothing was booked
    with a price since; lines booked without one get their money by corrections. Invalid for a negative or
    absurd price, an unknown site or a naive time, Conflict (`rate_already_booked`) for the past.
    """
    may_price(acting_user)
    if valid_from.tzinfo is None:
        raise Invalid.field("valid_from", _("The time needs a zone."))
    for name, micro in (
        ("price", micro_per_gpu_hour),
        ("list_price", list_micro_per_gpu_hour or 0),
        ("power", power_micro_per_gpu_hour),
        ("idle", idle_micro_per_gpu_hour),
    ):
        if micro > HIGHEST:
            raise Invalid.field(name, _("This is more than 1,000,000 a GPU-hour. Check the amount."))
        if micro < 0:
            raise Invalid.field(name, _("A price cannot be negative. 0 is a price: it costs nothing."))
    if problem := site_problem(site_code):
        raise Invalid.field("site", problem)
    with transaction.atomic():
        GpuFlavour.objects.select_for_update(no_key=True).get(pk=flavour.pk)
        if valid_from < now() - LATE_BY:
            _refuse_booked_past(flavour, site_code, department, valid_from)
        found = list(
            PriceRate.objects.select_for_update()
            .filter(flavour=flavour, site_code=site_code, department=department)
            .order_by("during")
        )
        before = next((r for r in reversed(found) if r.during.lower <= valid_from), None)
        following = next((r for r in found if r.during.lower > valid_from), None)
        if before is not None and before.during.lower == valid_from:
            raise Conflict(
                code="rate_starts_then",
                detail=_("A price of this flavour starts at that very moment. Choose another time."),
            )
        old = None
        if before is not None and (before.during.upper is None or before.during.upper > valid_from):
            old = before.micro_per_gpu_hour
            PriceRate.objects.filter(pk=before.pk).update(
                during=(before.during.lower, valid_from), updated_at=now(), version=F("version") + 1
            )
        try:
            with transaction.atomic():
                rate = PriceRate.objects.create(
                    flavour=flavour,
                    site_code=site_code,
                    department=department,
                    micro_per_gpu_hour=micro_per_gpu_hour,
                    list_micro_per_gpu_hour=list_micro_per_gpu_hour,
                    power_micro_per_gpu_hour=power_micro_per_gpu_hour,
                    idle_micro_per_gpu_hour=idle_micro_per_gpu_hour,
                    during=(valid_from, following.during.lower if following else None),
                    book=book.strip(),
                    entered_by_name=acting_user.name,
                )
        except IntegrityError as error:
            raise Conflict(
                code="rate_overlaps",
                detail=_("Somebody set another price for that time just now. Load the page again."),
            ) from error
        rate.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="price.set",
            subject=rate,
            before={"micro_per_gpu_hour": old},
            after={
                "micro_per_gpu_hour": micro_per_gpu_hour,
                "flavour": flavour.code,
                "site": site_code,
                "department": department.code if department is not None else "",
                "list_micro_per_gpu_hour": list_micro_per_gpu_hour,
                "power_micro_per_gpu_hour": power_micro_per_gpu_hour,
                "idle_micro_per_gpu_hour": idle_micro_per_gpu_hour,
                "valid_from": valid_from.isoformat(),
                "book": rate.book,
            },
            reason=reason,
        )
        _price_late(rate)
        return rate


def may_price(acting_user: Actor) -> None:
    """Refused for who does not keep the books."""
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.keeps_books)


def _touched(flavour: GpuFlavour, site_code: str, department: Department | None, since: datetime) -> Q:
    query = Q(kind=LedgerEntry.Kind.USAGE, flavour=flavour, ends_at__gt=since)
    if site_code:
        query &= Q(site_code=site_code)
    if department is not None:
        query &= Q(department_id_ref__in=DepartmentTree.load().subtree(department.pk))
    return query


def _refuse_booked_past(
    flavour: GpuFlavour, site_code: str, department: Department | None, valid_from: datetime
) -> None:
    touched = _touched(flavour, site_code, department, valid_from)
    priced = LedgerEntry.objects.filter(touched, rate_uid__isnull=False)
    if priced.exists():
        raise Conflict(
            code="rate_already_booked",
            detail=_(
                "Lines after that time are booked with a price already. "
                "Choose a time from now on, or correct single lines."
            ),
        )


_PAID = Q(rate_uid__isnull=False) | ~Q(amount_micro=0)
"""A correction after which a line that was booked without a price has one, or money."""


def _price_late(rate: PriceRate) -> None:
    """Corrections for lines that were booked without a price while this rate holds, of the hours that are left of
    them; the incident ends when none is left. A line that began before the rate, or ran past it, or got money by hand
    is left to a correction by hand.
    """
    lines = LedgerEntry.objects.filter(
        _touched(rate.flavour, rate.site_code, rate.department, rate.during.lower),
        rate_uid=None,
        starts_at__gte=rate.during.lower,
    ).exclude(Exists(LedgerEntry.objects.filter(_PAID, corrects=OuterRef("pk"))))
    if rate.during.upper is not None:
        lines = lines.filter(ends_at__lte=rate.during.upper)
    books = books_for_booking()
    LedgerEntry.objects.bulk_create(
        [
            _priced(line, rate, books.month_for(line.local_day))
            for line in lines.select_for_update(of=("self",), no_key=True).prefetch_related("corrections")
        ],
        batch_size=1000,
    )
    for site in {"", rate.site_code, *_sites_of(rate)}:
        if not unpriced(flavour_id=rate.flavour_id, site_code=site).exists():
            incident_resolve(
                dedupe_key=f"price_missing:{rate.flavour.code}:{site}", note=f"{rate.flavour.code}: price set"
            )


def _priced(line: LedgerEntry, rate: PriceRate, booked_month: date) -> LedgerEntry:
    correction = correction_of(
        line,
        gpu_ms=0,
        amount_micro=cost_micro(
            line.gpu_ms + sum(one.gpu_ms for one in line.corrections.all()), rate.charged_micro
        ),
        reason=PRICED_LATE,
        booked_month=booked_month,
    )
    correction.micro_per_gpu_hour = rate.charged_micro
    correction.rate_uid = rate.uid
    return correction


def _sites_of(rate: PriceRate) -> set[str]:
    return set(
        LedgerEntry.objects.filter(flavour_id=rate.flavour_id, rate_uid=None)
        .values_list("site_code", flat=True)
        .distinct()
    )


def unpriced(*, flavour_id: int, site_code: str) -> QuerySet[LedgerEntry]:
    """Lines booked without a price that no correction has given one."""
    return LedgerEntry.objects.filter(
        kind=LedgerEntry.Kind.USAGE, flavour_id=flavour_id, site_code=site_code, rate_uid=None
    ).exclude(corrections__rate_uid__isnull=False)
