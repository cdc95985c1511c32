"""What notify itself tells people, from events of the rooms below; and the kinds for it."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Role, RoleBinding
from portal.accounts.selectors.people import holders
from portal.notify import kinds
from portal.notify.services.notices import notify
from portal.ops.kinds import kind_of as incident_kind
from portal.ops.models import Incident
from portal.ops.outbox import subscribe


def _role_words(params: kinds.Params) -> kinds.Params:
    labels = dict(Role.choices)
    return {
        **params,
        "role": labels.get(params.get("role", ""), params.get("role")),
        "where": params.get("where") or _("the whole installation"),
    }


kinds.register(
    "accounts.role_granted",
    _("You are now %(role)s for %(where)s"),
    _("Granted by %(by)s."),
    group="account",
    label=_("A role was given to me or ended"),
    tone="ok",
    icon="users",
    prepare=_role_words,
)
kinds.register(
    "accounts.role_withdrawn",
    _("You are no longer %(role)s for %(where)s"),
    group="account",
    label=_("A role of mine ended"),
    tone="mute",
    icon="users",
    prepare=_role_words,
)


def _incident_words(params: kinds.Params) -> kinds.Params:
    title = str(incident_kind(str(params.get("kind", ""))).title)
    return {**params, "what": f"{title}, {params['label']}" if params.get("label") else title}


kinds.register(
    "ops.incident_opened",
    _("Incident: %(what)s"),
    _("Opened at %(opened_at)s. Open it to see whom it touches and to close it with a note."),
    urgent=True,
    group="act",
    label=_("An incident was opened"),
    tone="bad",
    icon="fault",
    prepare=_incident_words,
)


def on_role(payload: dict[str, Any], kind: str) -> None:
    """Tell the person."""
    binding = RoleBinding.objects.select_related("department").filter(uid=payload["binding"]).first()
    if binding is None:
        return
    notify(
        user_ids=[binding.user_id],
        kind=kind,
        subject=binding,
        params={
            "role": binding.role,
            "where": binding.department.name if binding.department is not None else "",
            "by": binding.granted_by_name,
        },
        url="/accounts/profile/",
    )


def on_role_granted(payload: dict[str, Any]) -> None:
    """A role was bound."""
    on_role(payload, "accounts.role_granted")


def on_role_withdrawn(payload: dict[str, Any]) -> None:
    """A role ended before its time."""
    on_role(payload, "accounts.role_withdrawn")


def on_incident_opened(payload: dict[str, Any]) -> None:
    """Tell the pool administrators, once per incident; a mere note (severity info) tells nobody."""
    incident = Incident.objects.filter(uid=payload["incident"]).first()
    if incident is None or incident.severity == Incident.Severity.INFO:
        return
    notify(
        user_ids=holders(Role.POOL_ADMIN, None),
        kind="ops.incident_opened",
        subject=incident,
        params={"kind": incident.kind, "label": incident.subject_label, "opened_at": incident.opened_at},
        url=f"/incidents/{incident.uid}/",
    )


subscribe("accounts.role_granted", "portal.notify.subscriptions.on_role_granted")
subscribe("accounts.role_withdrawn", "portal.notify.subscriptions.on_role_withdrawn")
subscribe("ops.incident_opened", "portal.notify.subscriptions.on_incident_opened")
