"""The form of a delegation."""

from __future__ import annotations

from django import forms
from django.utils.translation import gettext_lazy as _

from quotas.web.forms import ServiceForm

TIME = {"type": "datetime-local"}


class DelegationForm(ServiceForm):
    """Deputy and dates."""

    deputy = forms.CharField(
        label=_("Deputy"),
        help_text=_("User name. Never decides own requests, nor yours."),
        widget=forms.TextInput(attrs={"list": "people"}),
    )
    starts_at = forms.CharField(label=_("From"), required=False, widget=forms.TextInput(attrs=TIME))
    ends_at = forms.CharField(label=_("Until"), widget=forms.TextInput(attrs=TIME))
