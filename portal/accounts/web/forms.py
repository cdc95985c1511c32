"""Forms of this room. They parse; what is allowed is the services' to say."""

from __future__ import annotations

import zoneinfo
from datetime import datetime, time
from functools import cache
from typing import Any

from django import forms
from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.accounts.models import Department, Role, User
from portal.accounts.policy import DepartmentTree
from portal.accounts.services.tokens import SCOPES
from portal.kernel.errors import DomainError

LONGEST_DAYS = 366


def take_errors(form: forms.BaseForm, error: DomainError) -> None:
    """Put what a service refused beside the fields it concerns; the input stays."""
    pointed = False
    for problem in error.errors:
        if problem["pointer"] in form.fields:
            form.add_error(problem["pointer"], problem["detail"])
            pointed = True
    if not pointed:
        form.add_error(None, error.detail)


@cache
def zone_choices() -> tuple[tuple[str, str], ...]:
    """Zones of places, by name (the historical aliases are left out)."""
    kept = sorted(
        z for z in zoneinfo.available_timezones() if "/" in z and not z.startswith(("Etc/", "SystemV/"))
    )
    return tuple((z, z.replace("_", " ")) for z in ["UTC", *kept])


def department_choices(
    tree: DepartmentTree, empty: Any, only: set[int] | None = None
) -> list[tuple[str, Any]]:
    """Open departments of the tree for a select, indented by depth; values are codes (short: pages hold many)."""
    rows: list[tuple[str, Any]] = [("", empty)] if empty is not None else []
    for depth, row in tree.ordered():
        if row.is_open and (only is None or row.pk in only):
            rows.append((row.code, "\u2003" * depth + row.name))
    return rows


class DepartmentField(forms.ChoiceField):
    """A department of the tree; cleans to the row, or None where nothing is chosen."""

    def __init__(self, *, empty: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.empty = empty
        self.tree: DepartmentTree | None = None

    def offer(self, tree: DepartmentTree, only: set[int] | None = None) -> None:
        """Offer the open departments of `tree`."""
        self.tree = tree
        self.choices = department_choices(tree, self.empty, only)

    def to_python(self, value: Any) -> str:
        """The code; links and programs may send the uid instead."""
        found = department_named(self.tree, str(value or "")) if self.tree is not None else None
        return found.code if found is not None else super().to_python(value)

    def clean(self, value: Any) -> Department | None:
        """The chosen row."""
        code = super().clean(value)
        return department_named(self.tree, code) if code and self.tree is not None else None


def department_named(tree: DepartmentTree, name: str) -> Department | None:
    """A department by its code or uid."""
    return (
        next((row for row in tree.rows.values() if name in (row.code, str(row.uid))), None) if name else None
    )


class PreferencesForm(forms.Form):
    """Language, time zone, theme."""

    language = forms.ChoiceField(label=_("Language"), choices=settings.LANGUAGES)
    time_zone = forms.ChoiceField(
        label=_("Time zone"), required=False, help_text=_("Pages and messages show times in it.")
    )
    theme = forms.ChoiceField(label=_("Theme"), choices=User.Theme.choices, widget=forms.RadioSelect)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        default = _("That of the site (%(zone)s)") % {"zone": settings.GPUPOOL_BILLING_TIME_ZONE}
        self.fields["time_zone"].choices = [("", default), *zone_choices()]  # type: ignore[attr-defined]


def _password(label: Any, complete: str) -> forms.CharField:
    return forms.CharField(
        label=label, strip=False, widget=forms.PasswordInput(attrs={"autocomplete": complete}), max_length=200
    )


class PasswordForm(forms.Form):
    """Change of one's own password."""

    old_password = _password(_("Present password"), "current-password")
    password = _password(_("New password"), "new-password")
    repeat = _password(_("New password once more"), "new-password")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["password"].help_text = _("10 characters or more; a sentence works well.")

    def clean(self) -> dict[str, Any]:
        """The two new ones agree."""
        data = super().clean() or {}
        if data.get("password") and data.get("repeat") and data["password"] != data["repeat"]:
            self.add_error("repeat", _("This differs from the new password above."))
        return data


class PersonForm(forms.Form):
    """A person's fields; `username` only for a new one."""

    username = forms.CharField(
        label=_("User name"),
        max_length=64,
        help_text=_("For signing in; it never changes. Small letters, digits, dot, dash."),
        widget=forms.TextInput(
            attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}
        ),
    )
    display_name = forms.CharField(label=_("Name"), max_length=120)
    email = forms.CharField(label=_("Mail"), max_length=254, required=False)
    home_department = DepartmentField(label=_("Department"), required=False, empty=_("None"))
    system_account = forms.CharField(
        label=_("Account on nodes"),
        max_length=32,
        required=False,
        help_text=_("Work runs as this account. Empty: the same as the user name."),
    )
    language = forms.ChoiceField(label=_("Language"), choices=settings.LANGUAGES)

    def __init__(self, *args: Any, tree: DepartmentTree, new: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["home_department"].offer(tree)  # type: ignore[attr-defined]
        if not new:
            del self.fields["username"]


class RoleForm(forms.Form):
    """A role to bind. The end is a day, inclusive, in the reader's zone."""

    role = forms.ChoiceField(label=_("Role"), choices=Role.choices)
    department = DepartmentField(
        label=_("Bound to"),
        required=False,
        empty=_("The whole installation"),
        help_text=_("It holds for all below."),
    )
    valid_from = forms.DateField(
        label=_("From"),
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text=_("Empty: now."),
    )
    valid_to = forms.DateField(
        label=_("Last day"),
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text=_("Empty: until withdrawn."),
    )

    def __init__(self, *args: Any, tree: DepartmentTree, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["department"].offer(tree)  # type: ignore[attr-defined]

    def span(self) -> dict[str, datetime | None]:
        """`valid_from` and `valid_to` as instants; the last day counts whole."""
        zone = timezone.get_current_timezone()
        start, last = self.cleaned_data["valid_from"], self.cleaned_data["valid_to"]
        begin = datetime.combine(start, time.min, zone) if start else None
        end = datetime.combine(last, time.min, zone) if last else None
        if end is not None:
            end = datetime.combine(last.fromordinal(last.toordinal() + 1), time.min, zone)
        return {"valid_from": begin, "valid_to": end}


class SuspendForm(forms.Form):
    """Why, and what becomes of the leases."""

    leases = forms.ChoiceField(
        label=_("Leases of this person"),
        choices=[("end", _("End, with notice and grace")), ("keep", _("Go on until they end"))],
        widget=forms.RadioSelect,
        initial="end",
    )
    reason = forms.CharField(label=_("Reason"), max_length=500)


class ReasonForm(forms.Form):
    """A reason that is required."""

    reason = forms.CharField(label=_("Reason"), max_length=500)


class DepartmentForm(forms.Form):
    """A department; `code` only for a new one."""

    code = forms.CharField(
        label=_("Code"), max_length=48, help_text=_("Short and stable, like vision; it never changes.")
    )
    name = forms.CharField(label=_("Name"), max_length=120)
    parent = DepartmentField(label=_("Below"), required=False, empty=_("At the top"))
    cost_center = forms.CharField(label=_("Cost centre"), max_length=48, required=False)

    def __init__(self, *args: Any, tree: DepartmentTree, new: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["parent"].offer(tree)  # type: ignore[attr-defined]
        if not new:
            del self.fields["code"]
            del self.fields["parent"]


class MoveForm(forms.Form):
    """Where a department shall hang."""

    parent = DepartmentField(label=_("Below"), required=False, empty=_("At the top"))

    def __init__(self, *args: Any, tree: DepartmentTree, moving: Department, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        others = set(tree.rows) - set(tree.subtree(moving.pk))
        self.fields["parent"].offer(tree, others)  # type: ignore[attr-defined]


SCOPE_LABELS = {
    "read": _("Read what I may see"),
    "request": _("Ask, extend, release"),
    "approve": _("Decide approvals"),
    "admin": _("Administer, where my roles allow"),
}


class TokenForm(forms.Form):
    """A new token."""

    name = forms.CharField(
        label=_("Name"), max_length=80, help_text=_("Where it is used, like laptop or ci-eval.")
    )
    scopes = forms.MultipleChoiceField(
        label=pgettext_lazy("token", "May"),
        choices=[(s, SCOPE_LABELS[s]) for s in SCOPES],
        widget=forms.CheckboxSelectMultiple,
        initial=["read"],
    )
    days = forms.IntegerField(label=_("Valid for"), min_value=1, max_value=LONGEST_DAYS, initial=90)


class UploadForm(forms.Form):
    """A table to import."""

    file = forms.FileField(
        label=_("File"),
        help_text=_("CSV (UTF-8 or GB18030) or XLSX, up to 20 MiB."),
        widget=forms.ClearableFileInput(attrs={"accept": ".csv,.xlsx"}),
    )
