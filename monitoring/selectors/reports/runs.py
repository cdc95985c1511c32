"""Who may see a kept run."""

from __future__ import annotations

from uuid import UUID

from django.utils.translation import gettext as _

from monitoring.models import ReportRun
from portal.accounts.policy import Policy
from portal.kernel.errors import NotFound


def run_for(policy: Policy, uid: UUID) -> ReportRun:
    """The run: its owner's, or of those whose view holds all that is in it. NotFound otherwise."""
    run = ReportRun.objects.select_related("owner", "saved").filter(uid=uid).first()
    if run is not None:
        scope = policy.reads_money
        inside = scope.everything or (bool(run.departments) and set(run.departments or ()) <= set(scope.ids))
        only_own = run.owner_id == policy.user.pk and run.departments == []  # nothing but their own leases
        if inside or only_own:
            return run
    raise NotFound(code="not_found", detail=_("There is no such report."))
