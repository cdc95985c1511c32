"""The form that asks a what-if: a period or a recorded workload, and what would be different."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from django import forms
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from pool.models import SchedulingPolicy
from portal.kernel.units import micro_from_money
from quotas.models import GpuFlavour

QUOTA_ROWS = 2
NO_RECLAIM = "no-reclaim"


class DayInput(forms.DateInput):
    """A day as browsers pick it."""

    input_type = "date"

    def __init__(self) -> None:
        super().__init__(format="%Y-%m-%d")


class _Shared(forms.Form):
    name = forms.CharField(label=_("Question"), max_length=120)
    policy = forms.ChoiceField(label=pgettext_lazy("scheduler", "Policy"), required=False)
    borrowing = forms.ChoiceField(
        label=pgettext_lazy("what-if", "Borrowing"),
        required=False,
        choices=[("", _("as it was")), ("none", _("nobody above the guarantee"))],
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        versions = SchedulingPolicy.objects.order_by("-id")[:20]
        field = self.fields["policy"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [
            ("", gettext("as it was")),
            (NO_RECLAIM, gettext("owners take nothing back")),
            *((str(v.uid), str(v)) for v in versions),
        ]

    def shared_changes(self) -> dict[str, Any]:
        """Policy and borrowing as the service takes them."""
        data = self.cleaned_data
        out: dict[str, Any] = {}
        if data["policy"] == NO_RECLAIM:
            out["switches"] = {"reclaim": False}
        elif data["policy"]:
            out["policy"] = data["policy"]
        if data["borrowing"] == "none":
            out["borrowing"] = False
        return out


class PastForm(_Shared):
    """About the pool's own past."""

    since = forms.DateField(label=_("From"), widget=DayInput())
    until = forms.DateField(label=_("To"), widget=DayInput())
    flavour = forms.ChoiceField(label=_("Flavour"), required=False)
    node_flavour = forms.ChoiceField(label=_("Fleet"), required=False)
    node_count = forms.IntegerField(
        label=_("Nodes more or fewer"), required=False, min_value=-10_000, max_value=10_000
    )
    price_flavour = forms.ChoiceField(label=_("Price of"), required=False)
    price = forms.DecimalField(
        label=_("Price of a GPU-hour"), required=False, max_digits=14, decimal_places=6, min_value=0
    )

    def __init__(self, *args: Any, today: date, departments: list[tuple[str, str]], **kwargs: Any) -> None:
        kwargs.setdefault(
            "initial", {"since": today - timedelta(days=30), "until": today - timedelta(days=1)}
        )
        super().__init__(*args, **kwargs)
        flavours = [(f.code, f.name) for f in GpuFlavour.objects.order_by("position", "name")]
        self._choices("flavour", [("", gettext("all flavours")), *flavours])
        self._choices("node_flavour", [("", gettext("as it is today")), *flavours])
        self._choices("price_flavour", [("", gettext("as it was")), *flavours])
        for n in range(1, QUOTA_ROWS + 1):
            self.fields[f"department_{n}"] = forms.ChoiceField(
                label=_("Department"), required=False, choices=[("", gettext("as it was")), *departments]
            )
            self.fields[f"quota_flavour_{n}"] = forms.ChoiceField(
                label=_("Flavour"), required=False, choices=[("", "–"), *flavours]
            )
            self.fields[f"guaranteed_{n}"] = forms.IntegerField(
                label=_("Guaranteed"), required=False, min_value=0, max_value=1_000_000
            )

    def _choices(self, name: str, choices: list[tuple[str, str]]) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = choices

    @property
    def quota_rows(self) -> list[tuple[Any, Any, Any]]:
        """Bound fields of the quotas that may be changed."""
        return [
            (self[f"department_{n}"], self[f"quota_flavour_{n}"], self[f"guaranteed_{n}"])
            for n in range(1, QUOTA_ROWS + 1)
        ]

    def clean(self) -> dict[str, Any] | None:
        """What belongs together is given together."""
        data = super().clean() or {}
        pairs = [("node_flavour", "node_count"), ("price_flavour", "price")]
        pairs += [(f"department_{n}", f"guaranteed_{n}") for n in range(1, QUOTA_ROWS + 1)]
        pairs += [(f"department_{n}", f"quota_flavour_{n}") for n in range(1, QUOTA_ROWS + 1)]
        for first, second in pairs:
            if bool(data.get(first)) and data.get(second) in (None, "") and second not in self.errors:
                self.add_error(second, gettext("This belongs to it."))
        return data

    def params(self) -> dict[str, Any]:
        """The question as the service takes it."""
        data = self.cleaned_data
        changes = self.shared_changes()
        if data["node_flavour"]:
            changes["nodes"] = {data["node_flavour"]: data["node_count"]}
        if data["price_flavour"]:
            changes["prices"] = {data["price_flavour"]: micro_from_money(data["price"])}
        quotas = [
            {
                "department": data[f"department_{n}"],
                "flavour": data[f"quota_flavour_{n}"],
                "guaranteed": 1000 * data[f"guaranteed_{n}"],
            }
            for n in range(1, QUOTA_ROWS + 1)
            if data[f"department_{n}"]
        ]
        if quotas:
            changes["quotas"] = quotas
        return {
            "source": "pool",
            "from": data["since"].isoformat(),
            "to": data["until"].isoformat(),
            "flavour": data["flavour"],
            "changes": changes,
        }


class TraceForm(_Shared):
    """About a recorded workload in two files."""

    jobs = forms.FileField(
        label=_("Jobs, CSV"), help_text=_("job_id, submit_time, duration, gpu_num, vc; seconds")
    )
    quotas = forms.FileField(label=_("Quotas, CSV"), help_text=_("vc, nominal_gpus; the pool is their sum"))
    cards = forms.IntegerField(
        label=_("GPUs more or fewer"), required=False, min_value=-10_000, max_value=10_000
    )
    price = forms.DecimalField(
        label=_("Price of a GPU-hour"), required=False, max_digits=14, decimal_places=6, min_value=0
    )

    def params(self) -> dict[str, Any]:
        """The question as the service takes it."""
        data = self.cleaned_data
        changes = self.shared_changes()
        if data["cards"]:
            changes["nodes"] = {"gpu": data["cards"]}
        return {"source": "trace", "price": micro_from_money(data["price"] or 0), "changes": changes}
