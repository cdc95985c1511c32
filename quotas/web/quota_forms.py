"""Forms of quota pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from quotas.models import GpuFlavour
from quotas.selectors.grants import GrantNumbers
from quotas.web.forms import ServiceForm
from quotas.web.words import gpus

GPUS = {"inputmode": "decimal"}
UNLIMITED = {"inputmode": "decimal", "placeholder": "∞"}
TIME = {"type": "datetime-local"}


class GrantForm(ServiceForm):
    """The numbers of one department and flavour, when, and why."""

    guaranteed = forms.CharField(label=_("Guaranteed"), widget=forms.TextInput(attrs=GPUS))
    borrow_limit = forms.CharField(
        label=_("Borrow limit"), required=False, widget=forms.TextInput(attrs=UNLIMITED)
    )
    lend_limit = forms.CharField(
        label=_("Lend limit"), required=False, widget=forms.TextInput(attrs=UNLIMITED)
    )
    hard_cap = forms.CharField(label=_("Hard cap"), required=False, widget=forms.TextInput(attrs=UNLIMITED))
    weight = forms.CharField(label=_("Weight"), required=False, widget=forms.NumberInput(attrs={"min": "0"}))
    starts_at = forms.CharField(label=_("From"), required=False, widget=forms.TextInput(attrs=TIME))
    ends_at = forms.CharField(label=_("Until"), required=False, widget=forms.TextInput(attrs=TIME))
    reason = forms.CharField(label=_("Reason"), required=False, widget=forms.Textarea(attrs={"rows": 2}))

    @staticmethod
    def initial_of(numbers: GrantNumbers) -> dict[str, Any]:
        """The numbers in force; unlimited ones as ∞, so that nobody takes an empty field for nothing."""
        values = {name: value for name, value in numbers.as_fields().items() if name != "weight"}
        return {name: gpus(v).replace(",", "") for name, v in values.items()} | {"weight": numbers.weight}


class ChangeForm(GrantForm):
    """A change that a department asks for: other numbers, or a lending for a period."""

    kind = forms.ChoiceField(
        choices=[("numbers", _("Other numbers")), ("lending", _("Lending for a period"))]
    )
    department = forms.ChoiceField(label=_("Department"))
    flavour = forms.ChoiceField(label=_("Flavour"))
    lender = forms.ChoiceField(label=_("Lent by"), required=False)
    amount = forms.CharField(label=_("GPUs to lend"), required=False, widget=forms.TextInput(attrs=GPUS))
    purpose = forms.CharField(label=_("Why"), widget=forms.Textarea(attrs={"rows": 3}))

    def __init__(self, *args: Any, policy: Policy, flavours: Iterable[GpuFlavour], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scope = policy.scope("lead", "pool_admin")
        everyone = [
            (str(d.uid), policy.tree.path(d.pk), d) for _depth, d in policy.tree.ordered() if d.is_open
        ]
        self._set("department", [(uid, path) for uid, path, d in everyone if d.pk in scope])
        self._set("lender", [("", "–"), *[(uid, path) for uid, path, _d in everyone]])
        self._set("flavour", [(f.code, f.name) for f in flavours])

    def _set(self, name: str, options: list[tuple[str, str]]) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = options
