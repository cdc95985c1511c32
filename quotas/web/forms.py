"""Forms of this room. They only lay out and keep what was typed: services check, and their problems come back
here beside the fields (``take``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS
from django.forms.utils import ErrorDict
from django.utils import timezone
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from portal.kernel.errors import DomainError
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.catalogue import mig_table
from quotas.web.words import money


class ServiceForm(forms.Form):
    """A form whose checks are the service's: ``values()`` hands over what was typed, ``take`` brings
    problems back.
    """

    use_required_attribute = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_bound:
            self._errors = ErrorDict()

    def typed(self, name: str) -> str:
        """What was typed into a field, without blanks around it."""
        return str(self.data.get(self.add_prefix(name), "") or "").strip()

    def take(self, error: DomainError, names: Mapping[str, str] | None = None) -> None:
        """Put a service's problems beside their fields; what belongs to no field goes above the form."""
        assert self._errors is not None
        for problem in error.errors or [{"pointer": "", "detail": error.detail}]:
            name = (names or {}).get(problem["pointer"], problem["pointer"])
            key = name if name in self.fields else NON_FIELD_ERRORS
            kept = self._errors.setdefault(key, self.error_class(renderer=self.renderer))
            kept.append(str(problem["detail"]))

    def moment(self, name: str) -> Any:
        """A local date and time of the reader as an aware one; what cannot be read stays text, for the
        service.
        """
        text = self.typed(name)
        if not text:
            return None
        try:
            naive = datetime.fromisoformat(text)
        except ValueError:
            return text
        zone = timezone.get_current_timezone()
        return naive if naive.tzinfo is not None else naive.replace(tzinfo=ZoneInfo(str(zone)))


def local_input(moment: datetime | None) -> str:
    """The value of a ``datetime-local`` input."""
    return timezone.localtime(moment).strftime("%Y-%m-%dT%H:%M") if moment is not None else ""


HOURS = forms.NumberInput(attrs={"inputmode": "decimal", "min": "0.1", "step": "any"})
WHOLE = {"inputmode": "numeric", "min": "1", "step": "1"}


class RequestForm(ServiceForm):
    """The request form, all shapes on one page."""

    ask_by = forms.ChoiceField(choices=[("flavour", _("By flavour")), ("requirement", _("By requirement"))])
    flavour = forms.ChoiceField(label=_("Flavour"))
    need_gib = forms.CharField(
        label=_("Memory per GPU, at least"), widget=forms.NumberInput(attrs={**WHOLE}), required=False
    )
    need_nvlink = forms.BooleanField(label=_("NVLink"), help_text=_("between the GPUs asked"), required=False)
    need_fp8 = forms.BooleanField(
        label=_("FP8"), help_text=_("tensor cores with 8-bit floats"), required=False
    )
    need_mig = forms.BooleanField(label=_("MIG"), help_text=_("can be split"), required=False)
    shape = forms.ChoiceField(label=_("Shape"))
    gpus_per_node = forms.CharField(label=_("GPUs per node"), widget=forms.NumberInput(attrs={**WHOLE}))
    nodes = forms.CharField(
        label=pgettext_lazy("request", "Nodes"),
        help_text=_("Started together or not at all."),
        widget=forms.NumberInput(attrs={**WHOLE}),
    )
    fraction_milli = forms.CharField(
        label=_("Compute"),
        help_text=_("thousandths of a GPU"),
        required=False,
        widget=forms.NumberInput(attrs={**WHOLE, "max": "1000"}),
    )
    fraction_mib = forms.CharField(
        label=_("Memory"),
        help_text=_("a hard limit"),
        required=False,
        widget=forms.NumberInput(attrs={**WHOLE}),
    )
    mig_profile = forms.ChoiceField(label=_("MIG profile"), required=False)
    mig_count = forms.CharField(label=_("Slices"), required=False, widget=forms.NumberInput(attrs={**WHOLE}))
    start = forms.ChoiceField(
        label=_("Start"), choices=[("asap", _("As soon as possible")), ("window", _("Reserve a window"))]
    )
    start_at = forms.CharField(
        label=_("From"), required=False, widget=forms.TextInput(attrs={"type": "datetime-local"})
    )
    hours = forms.CharField(label=_("Duration"), widget=HOURS)
    is_service = forms.BooleanField(
        label=_("A service without an end"),
        help_text=_("It has a review date instead: you renew it by then or it stops."),
        required=False,
    )
    review_at = forms.CharField(
        label=_("Review date"), required=False, widget=forms.TextInput(attrs={"type": "datetime-local"})
    )
    replicas = forms.CharField(label=_("Replicas"), required=False, widget=forms.NumberInput(attrs={**WHOLE}))
    work_class = forms.ChoiceField(
        label=_("Class"),
        choices=[
            ("training", _("Training")),
            ("inference", _("Inference")),
            ("interactive", _("Interactive")),
        ],
    )
    interruptible = forms.ChoiceField(label=_("May it be interrupted?"))
    priority = forms.CharField(
        label=_("Priority"),
        help_text=_("0 to 100, within your department"),
        required=False,
        widget=forms.NumberInput(attrs={"min": "0", "max": "100"}),
    )
    department = forms.ChoiceField(label=_("Department"))
    cost_code = forms.CharField(label=_("Cost centre"), required=False)
    purpose = forms.CharField(label=_("Purpose"), widget=forms.Textarea(attrs={"rows": 2}))
    run_kind = forms.ChoiceField(label=_("What to run"))
    command = forms.CharField(
        label=_("Command"), widget=forms.Textarea(attrs={"rows": 3, "class": "mono", "spellcheck": "false"})
    )
    image = forms.CharField(label=_("Image"), widget=forms.TextInput(attrs={"class": "mono"}))
    cuda_min = forms.CharField(
        label=_("CUDA, at least"), required=False, widget=forms.TextInput(attrs={"inputmode": "decimal"})
    )
    checkpoint_signal = forms.CharField(
        label=_("Checkpoint signal"),
        required=False,
        widget=forms.TextInput(attrs={"class": "mono", "placeholder": "SIGUSR1"}),
    )
    checkpoint_seconds = forms.CharField(
        label=_("Seconds it needs"), required=False, widget=forms.NumberInput(attrs={**WHOLE})
    )
    token = forms.CharField(widget=forms.HiddenInput, required=False)
    cloned_from = forms.CharField(widget=forms.HiddenInput, required=False)

    def __init__(
        self,
        *args: Any,
        policy: Policy,
        flavours: Iterable[GpuFlavour],
        prices: Mapping[int, int],
        cpu: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        offered = list(flavours)
        self.offered = offered
        choose: list[Any] = [(f.code, flavour_label(f, prices.get(f.pk))) for f in offered]
        self.choices("flavour", choose)
        self.choices("shape", shape_choices(offered, cpu))
        self.choices("mig_profile", [("", "–"), *mig_choices(offered)])
        self.choices("department", department_choices(policy))
        self.choices(
            "interruptible",
            [("yes", gettext("Yes, with notice and checkpoint")), ("no", gettext("No"))],
        )
        self.choices(
            "run_kind",
            [("command", gettext("Command")), ("image", gettext("Container")), ("hold", gettext("Hold"))],
        )

    def choices(self, name: str, options: list[Any]) -> None:
        """Set the options of a choice field."""
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = options

    def values(self) -> dict[str, Any]:
        """What was typed, as the service takes it."""
        t = self.typed
        by_need = t("ask_by") == "requirement"
        service = t("is_service") != ""
        gib = t("need_gib")
        need: dict[str, Any] = {name: True for name in ("nvlink", "fp8", "mig") if t(f"need_{name}")}
        if gib:
            need["memory_mib"] = (
                int(gib) * 1024 if gib.isascii() and gib.isdecimal() and len(gib) < 8 else gib
            )
        checkpoint = {"signal": t("checkpoint_signal"), "seconds": t("checkpoint_seconds")}
        return {
            "department": t("department"),
            "flavour": "" if by_need or t("shape") == "cpu" else t("flavour"),
            "requirement": need if by_need else {},
            "shape": t("shape"),
            **{
                n: t(n)
                for n in (
                    "gpus_per_node",
                    "nodes",
                    "fraction_milli",
                    "fraction_mib",
                    "mig_profile",
                    "mig_count",
                )
            },
            "start_at": self.moment("start_at") if t("start") == "window" else None,
            "duration_s": None if service else seconds_of(t("hours")),
            "is_service": service,
            "review_at": self.moment("review_at") if service else None,
            "replicas_min": (t("replicas") or 1) if service else 1,
            "replicas_max": (t("replicas") or 1) if service else 1,
            **{n: t(n) for n in ("work_class", "priority", "cost_code", "run_kind", "cuda_min")},
            "interruptible": t("interruptible"),
            "purpose": t("purpose"),
            "command": self.data.get("command", "").replace("\r\n", "\n").strip(),
            "image": t("image") if t("run_kind") == "image" else "",
            "checkpoint": checkpoint if checkpoint["signal"] else {},
        }

    NAMES = {  # the service's field → the form's
        "duration_s": "hours",
        "requirement": "need_gib",
        "replicas_max": "replicas",
        "replicas_min": "replicas",
        "checkpoint": "checkpoint_signal",
    }

    @staticmethod
    def initial_of(request: CapacityRequest | None, policy: Policy, flavour: str = "") -> dict[str, Any]:
        """What the empty form shows, or the wishes of an earlier request."""
        home = policy.tree.rows.get(policy.user.home_department_id or 0)
        first = {
            "ask_by": "flavour",
            "flavour": flavour,
            "shape": "whole",
            "gpus_per_node": 1,
            "nodes": 1,
            "start": "asap",
            "hours": 12,
            "work_class": "training",
            "interruptible": "yes",
            "run_kind": "command",
            "mig_count": 1,
            "replicas": 1,
            "department": str(home.uid) if home is not None else "",
            "cost_code": home.cost_center if home is not None else "",
        }
        if request is None:
            return first
        r = request
        same = {
            n: getattr(r, n)
            for n in (
                "shape",
                "gpus_per_node",
                "nodes",
                "fraction_milli",
                "fraction_mib",
                "mig_profile",
                "mig_count",
                "is_service",
                "work_class",
                "priority",
                "cost_code",
                "purpose",
                "run_kind",
                "command",
                "image",
                "cuda_min",
            )
        }
        need = r.requirement
        return {
            **first,
            **same,
            "ask_by": "requirement" if r.flavour is None and need else "flavour",
            "flavour": r.flavour.code if r.flavour is not None else flavour,
            "need_gib": round(need["memory_mib"] / 1024) if need.get("memory_mib") else "",
            **{f"need_{n}": bool(need.get(n)) for n in ("nvlink", "fp8", "mig")},
            "nodes": 1 if r.is_service else r.nodes,
            "replicas": r.replicas_max,
            "start": "window" if r.start_at else "asap",
            "start_at": local_input(r.start_at),
            "hours": f"{r.duration_s / 3600:g}" if r.duration_s else "",
            "review_at": local_input(r.review_at),
            "interruptible": "yes" if r.interruptible else "no",
            "department": str(r.department.uid),
            "checkpoint_signal": r.checkpoint.get("signal", ""),
            "checkpoint_seconds": r.checkpoint.get("seconds", ""),
        }


def seconds_of(hours: str) -> Any:
    """Hours as typed (a decimal) in whole seconds; what is no number stays, for the service to refuse."""
    try:
        value = float(hours)
    except ValueError:
        return hours or None
    return round(value * 3600) if abs(value) < 1e9 else hours


def flavour_label(flavour: GpuFlavour, price: int | None) -> str:
    """``H800 80GB · ¥16.00/GPU·h``."""
    return f"{flavour.name} · {money(price)}/{gettext('GPU·h')}" if price is not None else flavour.name


def shape_choices(flavours: list[GpuFlavour], cpu: bool) -> list[tuple[str, str]]:
    """Shapes that something on offer can give."""
    out = [("whole", gettext("Whole GPUs")), ("fraction", gettext("Fraction"))]
    if any(f.mig_capable for f in flavours):
        out.append(("mig", gettext("MIG profile")))
    if cpu:
        out.append(("cpu", gettext("No GPU")))
    return out


def mig_choices(flavours: list[GpuFlavour]) -> list[Any]:
    """Profiles by flavour, with memory and charge."""
    groups: list[Any] = []
    for flavour in flavours:
        table = mig_table(flavour.mig_table) if flavour.mig_capable else None
        if table is None:
            continue
        rows = [
            (p.name, f"{p.name} · {p.compute_slices}/{table.compute_slices} GPU")
            for p in table.profiles
            if "+" not in p.name and "-" not in p.name
        ]
        groups.append((flavour.name, rows))
    return groups


def department_choices(policy: Policy) -> list[tuple[str, str]]:
    """Departments on whose behalf the person may ask, with their path; an only root is left out of longer
    paths.
    """
    scope = policy.asks_for
    roots = [d.pk for d in policy.tree.rows.values() if d.parent_id is None]
    lead = f"{policy.tree.path(roots[0])} / " if len(roots) == 1 else ""
    return [
        (str(d.uid), policy.tree.path(d.pk).removeprefix(lead))
        for _depth, d in policy.tree.ordered()
        if d.pk in scope and d.is_open
    ]
