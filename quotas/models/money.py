"""Prices and the ledger. Money is micro currency (1 CNY = 1,000,000), time is GPU-milliseconds, all integers."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.models import PublicModel
from quotas.models.flavour import GpuFlavour
from quotas.models.request import CapacityRequest


class PriceRate(PublicModel):
    """Price of one GPU-hour of a flavour during a time: the contracted one, and perhaps the list price beside it.

    Two surcharges are options: for power, on every GPU-hour held (what is charged is price + power, and the part is
    stated); for idle hours, booked as lines of their own once the telemetry of a day has settled.

    A department's own rate holds for all below it and beats the general one; the nearest department's wins, and among
    rates of one department (or general ones) a site's own beats that for all sites.
    """

    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="rates")
    site_code = models.CharField(max_length=48, blank=True)
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="rates"
    )
    micro_per_gpu_hour = models.BigIntegerField(help_text="what is charged: the contracted price")
    list_micro_per_gpu_hour = models.BigIntegerField(
        null=True, blank=True, help_text="the list price, where it differs"
    )
    power_micro_per_gpu_hour = models.BigIntegerField(
        default=0, help_text="surcharge for power and cooling, on top of the price of every GPU-hour held"
    )
    idle_micro_per_gpu_hour = models.BigIntegerField(
        default=0, help_text="surcharge on GPU-hours that were held idle, by telemetry"
    )
    during = DateTimeRangeField()
    book = models.CharField(max_length=48, blank=True, help_text="version of the price book it came with")
    entered_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="rate_one_at_a_time",
                expressions=[
                    ("flavour", RangeOperators.EQUAL),
                    ("site_code", RangeOperators.EQUAL),
                    (Coalesce(F("department_id"), Value(0)), RangeOperators.EQUAL),
                    ("during", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(condition=Q(micro_per_gpu_hour__gte=0), name="rate_not_negative"),
            models.CheckConstraint(
                condition=Q(list_micro_per_gpu_hour=None) | Q(list_micro_per_gpu_hour__gte=0),
                name="rate_list_not_negative",
            ),
            models.CheckConstraint(
                condition=Q(power_micro_per_gpu_hour__gte=0, idle_micro_per_gpu_hour__gte=0),
                name="rate_surcharges_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.flavour} {self.micro_per_gpu_hour}"

    @property
    def charged_micro(self) -> int:
        """What a GPU-hour that is held costs: price and power."""
        return self.micro_per_gpu_hour + self.power_micro_per_gpu_hour

    @property
    def list_micro(self) -> int:
        """The list price; where none is named, the price. Power comes on top of both."""
        own = self.list_micro_per_gpu_hour
        return self.micro_per_gpu_hour if own is None else own


class UsageSpan(PublicModel):
    """What pool told about one lease's holding of one GPU (or share): open until the GPU was seen free.

    The ledger is cut from these. `key` is the lease's uid, so telling twice changes nothing. `accrued_to` is
    how far the ledger has got.
    """

    key = models.UUIDField(unique=True)
    request = models.ForeignKey(CapacityRequest, on_delete=models.PROTECT, related_name="usage_spans")
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, related_name="usage_spans"
    )
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="usage_spans")
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="usage_spans")
    site_code = models.CharField(max_length=48, blank=True)
    node_name = models.CharField(max_length=120, blank=True)
    gpu_label = models.CharField(max_length=120, blank=True)
    gpu_uid = models.UUIDField(null=True)
    charge_milli = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    accrued_to = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(ended_at=None) | Q(ended_at__gte=F("started_at")), name="usage_span_order"
            ),
            models.CheckConstraint(condition=Q(charge_milli__lte=1000), name="usage_span_charge"),
        ]
        indexes = [
            models.Index(fields=["accrued_to"], name="usage_span_open", condition=Q(ended_at=None)),
            models.Index(fields=["department", "started_at"], name="usage_span_department"),
        ]

    def __str__(self) -> str:
        return f"{self.gpu_label} {self.charge_milli}"


class LedgerEntry(models.Model):
    """One slice of GPU time at one price on one local day. Insert-only (trigger in migration 0002).

    `amount_micro = round_half_up(gpu_ms × micro_per_gpu_hour / 3,600,000)`; totals are sums of these rounded
    rows everywhere. A correction is a new row with `corrects` set and signed figures. An idle surcharge counts no
    hours of its own: what it is of stands in `surcharge_ms`, `amount_micro` is that × `micro_per_gpu_hour`.
    """

    class Kind(models.TextChoices):
        USAGE = "usage", _("Usage")
        IDLE = "idle", _("Idle surcharge")
        CORRECTION = "correction", _("Correction")

    id = models.BigAutoField(primary_key=True)
    uid = models.UUIDField(unique=True)
    kind = models.CharField(max_length=12, choices=Kind.choices, default=Kind.USAGE)
    span = models.ForeignKey(UsageSpan, on_delete=models.PROTECT, null=True, related_name="entries")
    request_id_ref = models.BigIntegerField(null=True, help_text="id of the capacity request")
    department_id_ref = models.BigIntegerField()
    department_path = models.CharField(max_length=600, help_text="names as they were then")
    user_id_ref = models.BigIntegerField(null=True)
    user_name = models.CharField(max_length=200, blank=True)
    cost_code = models.CharField(max_length=48, blank=True)
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="ledger_entries")
    flavour_name = models.CharField(max_length=120)
    site_code = models.CharField(max_length=48, blank=True)
    node_name = models.CharField(max_length=120, blank=True)
    gpu_label = models.CharField(max_length=120, blank=True)
    charge_milli = models.PositiveIntegerField(default=1000)
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    local_day = models.DateField(help_text="in the billing time zone")
    gpu_ms = models.BigIntegerField()
    surcharge_ms = models.BigIntegerField(
        default=0,
        help_text="GPU-milliseconds that a surcharge is of; the line of their use counts them as hours",
    )
    micro_per_gpu_hour = models.BigIntegerField(help_text="power included")
    rate_uid = models.UUIDField(null=True, help_text="price version; null: no price was set (counted as 0)")
    amount_micro = models.BigIntegerField()
    currency = models.CharField(max_length=3)
    corrects = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="corrections")
    reason = models.TextField(blank=True)
    booked_at = models.DateTimeField(default=now)
    booked_month = models.DateField(help_text="first day of the month in whose books it stands")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                Coalesce(F("span"), Value(0)), F("starts_at"), condition=Q(kind="usage"), name="ledger_once"
            ),
            models.UniqueConstraint("span", "local_day", condition=Q(kind="idle"), name="ledger_idle_once"),
            models.CheckConstraint(condition=Q(ends_at__gte=F("starts_at")), name="ledger_order"),
            models.CheckConstraint(
                condition=Q(kind="correction", corrects__isnull=False)
                | Q(kind="usage", gpu_ms__gte=0, surcharge_ms=0)
                | Q(kind="idle", gpu_ms=0, surcharge_ms__gte=0, span__isnull=False),
                name="ledger_kind",
            ),
        ]
        indexes = [
            models.Index(fields=["booked_month", "department_id_ref", "flavour"], name="ledger_month"),
            models.Index(fields=["local_day"], name="ledger_day"),
            models.Index(fields=["department_id_ref", "local_day"], name="ledger_department"),
            models.Index(fields=["request_id_ref"], name="ledger_request"),
        ]

    def __str__(self) -> str:
        return f"{self.local_day} {self.department_path} {self.amount_micro}"


class LedgerMonth(models.Model):
    """A month of the books; a closed one takes only corrections booked in a later month."""

    month = models.DateField(primary_key=True)
    closed_at = models.DateTimeField(null=True, blank=True)
    closed_by_name = models.CharField(max_length=200, blank=True)
    totals = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"{self.month:%Y-%m}"


class LedgerSum(models.Model):
    """Sums of ledger lines by book month, day, kind and who and what they were for.

    Written by the database itself with every insert of lines (trigger in migration 0006), in the same
    transaction, so that it equals the lines at any moment; each statement adds rows of its own, so that bookings
    never wait for one another. `ledger_sums_merge` puts rows of one key together; the reconcile compares both sides.
    """

    id = models.BigAutoField(primary_key=True)
    booked_month = models.DateField()
    local_day = models.DateField()
    kind = models.CharField(max_length=12, choices=LedgerEntry.Kind.choices)
    department_id_ref = models.BigIntegerField()
    user_id_ref = models.BigIntegerField(null=True)
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="ledger_sums")
    site_code = models.CharField(max_length=48, blank=True)
    cost_code = models.CharField(max_length=48, blank=True)
    gpu_ms = models.BigIntegerField()
    amount_micro = models.BigIntegerField()
    power_micro = models.BigIntegerField(default=0, help_text="the part of it that is for power")
    lines = models.BigIntegerField()

    class Meta:
        indexes = [
            models.Index(fields=["booked_month", "department_id_ref"], name="ledger_sum_month"),
            models.Index(fields=["local_day", "department_id_ref"], name="ledger_sum_day"),
        ]

    def __str__(self) -> str:
        return f"{self.local_day} {self.department_id_ref} {self.amount_micro}"


class Budget(PublicModel):
    """What a department and all below it may use in a period of the books: money, GPU-hours, or both.

    The period is [`starts_on`, `ends_on`), first days of months. One budget per department and period length at a
    time. `stops`: once it is used up, no new work above the guarantee starts; running work is left alone.
    """

    class Period(models.TextChoices):
        MONTH = "month", _("month")
        QUARTER = "quarter", _("quarter")
        YEAR = "year", _("year")

    department = models.ForeignKey("accounts.Department", on_delete=models.PROTECT, related_name="budgets")
    period = models.CharField(max_length=8, choices=Period.choices)
    starts_on = models.DateField()
    ends_on = models.DateField()
    amount_micro = models.BigIntegerField(null=True, blank=True)
    gpu_ms = models.BigIntegerField(null=True, blank=True)
    stops = models.BooleanField(default=False)
    note = models.CharField(max_length=300, blank=True)
    set_by_name = models.CharField(max_length=200, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True, help_text="taken back, or replaced by another")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(ends_on__gt=F("starts_on")), name="budget_order"),
            models.CheckConstraint(
                condition=Q(amount_micro__isnull=False) | Q(gpu_ms__isnull=False), name="budget_of_something"
            ),
            models.CheckConstraint(
                condition=(Q(amount_micro=None) | Q(amount_micro__gt=0)) & (Q(gpu_ms=None) | Q(gpu_ms__gt=0)),
                name="budget_positive",
            ),
            models.UniqueConstraint(
                fields=["department", "period", "starts_on"], condition=Q(ended_at=None), name="budget_one"
            ),
        ]
        indexes = [
            models.Index(fields=["starts_on", "ends_on"], name="budget_period", condition=Q(ended_at=None))
        ]

    def __str__(self) -> str:
        return f"{self.department} {self.starts_on:%Y-%m}"


class BudgetWarning(models.Model):
    """A threshold of a budget that was reached, and told once."""

    class Measure(models.TextChoices):
        MONEY = "money", _("Money")
        HOURS = "hours", _("GPU-hours")

    id = models.BigAutoField(primary_key=True)
    budget = models.ForeignKey(Budget, on_delete=models.PROTECT, related_name="warnings")
    measure = models.CharField(max_length=8, choices=Measure.choices)
    percent = models.PositiveSmallIntegerField()
    used = models.BigIntegerField(help_text="micro currency or GPU-milliseconds when it was seen")
    at = models.DateTimeField(default=now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["budget", "measure", "percent"], name="budget_warning_once")
        ]

    def __str__(self) -> str:
        return f"{self.budget_id} {self.percent}"
