"""The request form. It only lays out and keeps what was typed: the service checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from quotas.models import CapacityRequest, GpuFlavour
from quotas.web.forms import (
    ServiceForm,
    department_choices,
    flavour_label,
    local_input,
    mig_choices,
    seconds_of,
    shape_choices,
)
from quotas.web.request_parts import HOURS, WHOLE, PlaceFields, SeriesFields, TimeFields

OF_SHAPE = ("gpus_per_node", "nodes", "fraction_milli", "fraction_mib", "mig_profile", "mig_count")


class RequestForm(TimeFields, PlaceFields, SeriesFields, ServiceForm):
    """The request form, all shapes on one page; what few need is in folded parts of its own."""

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
    hours = forms.CharField(label=_("Duration"), widget=HOURS)
    is_service = forms.BooleanField(
        label=_("A service without an end"),
        help_text=_("It has a review date instead: you renew it by then or it stops."),
        required=False,
    )
    review_at = forms.CharField(
        label=_("Review date"), required=False, widget=forms.TextInput(attrs={"type": "datetime-local"})
    )
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
        help_text=_("0 to 100, higher first, within your department"),
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
        self.place_choices(offered, policy)
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
            "requirement": {**(need if by_need else {}), **self.driver_value()},
            "shape": t("shape"),
            **{n: t(n) for n in OF_SHAPE},
            "duration_s": None if service or t("start") == "weekly" else seconds_of(t("hours")),
            "is_service": service,
            "review_at": self.moment("review_at") if service else None,
            **self.time_values(service),
            **self.place_values(),
            **(self.service_values() if service else self.series_values()),
            **{n: t(n) for n in ("work_class", "priority", "cost_code", "run_kind", "cuda_min")},
            "interruptible": t("interruptible"),
            "purpose": t("purpose"),
            "command": self.data.get("command", "").replace("\r\n", "\n").strip(),
            "image": t("image") if t("run_kind") == "image" else "",
            "checkpoint": checkpoint if checkpoint["signal"] else {},
        }

    NAMES: ClassVar[dict[str, str]] = {  # the service's field → the form's
        "duration_s": "hours",
        "requirement": "need_gib",
        "checkpoint": "checkpoint_signal",
        **TimeFields.NAMES,
        **PlaceFields.NAMES,
        **SeriesFields.NAMES,
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
            "hours": 12,
            "work_class": "training",
            "interruptible": "yes",
            "run_kind": "command",
            "mig_count": 1,
            **TimeFields.first(),
            **PlaceFields.first(),
            **SeriesFields.first(),
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
                *OF_SHAPE,
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
            **TimeFields.initial_time(r),
            **PlaceFields.initial_place(r),
            **SeriesFields.initial_series(r),
            "ask_by": "requirement" if r.flavour is None and need else "flavour",
            "flavour": r.flavour.code if r.flavour is not None else flavour,
            "need_gib": round(need["memory_mib"] / 1024) if need.get("memory_mib") else "",
            **{f"need_{n}": bool(need.get(n)) for n in ("nvlink", "fp8", "mig")},
            "nodes": 1 if r.is_service else r.nodes,
            "hours": f"{r.duration_s / 3600:g}" if r.duration_s else "",
            "review_at": local_input(r.review_at),
            "interruptible": "yes" if r.interruptible else "no",
            "department": str(r.department.uid),
            "checkpoint_signal": r.checkpoint.get("signal", ""),
            "checkpoint_seconds": r.checkpoint.get("seconds", ""),
        }

    FOLDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "run": ("checkpoint_signal", "cuda_min", "driver", "health_kind", "health_port", "health_path"),
        "order": ("array_count", "array_at_once", "nodes_min", "after", "deadline_at"),
        "place": (
            "site_code", "storage", "fabric", "fabric_gbit_s", "domain_required", "domain_preferred", "datasets",
        ),
    }  # fmt: skip

    def opened(self) -> dict[str, bool]:
        """The folded parts in which something stands or is wrong: they are shown open."""
        return {
            fold: any(self[name].value() or self[name].errors for name in names)
            or (fold == "order" and str(self["priority"].value() or "50") != "50")
            for fold, names in self.FOLDS.items()
        }
