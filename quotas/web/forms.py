"""Forms of this room. They only lay out and keep what was typed: services check, and their problems come back
here beside the fields (``take``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS
from django.forms.utils import ErrorDict
from django.utils import timezone
from django.utils.translation import gettext

from portal.accounts.policy import Policy
from portal.kernel.errors import DomainError
from quotas.models import GpuFlavour
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
