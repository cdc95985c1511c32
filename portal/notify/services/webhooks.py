"""Webhooks: where notices are posted. Administrators set them; the secret is shown once."""

from __future__ import annotations

import secrets
import urllib.parse
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import FieldProblem, Invalid
from portal.kernel.models import advance
from portal.notify.kinds import known
from portal.notify.models import WebhookEndpoint
from portal.notify.services.signing import Answer, post_signed
from portal.ops.actor import Actor
from portal.ops.services import audit_record


def _require_admin(acting_user: Actor) -> None:
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.administers_pool)


def _check(name: str, url: str, kinds: list[str]) -> None:
    found: list[FieldProblem] = []
    if not 0 < len(name) <= 80:
        found.append({"pointer": "name", "detail": _("A name of 1 to 80 characters is needed.")})
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or len(url) > 500 or parts.username:
        found.append(
            {"pointer": "url", "detail": _("An http or https address without a name or password in it.")}
        )
    unknown = sorted(set(kinds) - {k.name for k in known()})
    if unknown:
        found.append(
            {"pointer": "kinds", "detail": _("Not known: %(names)s.") % {"names": ", ".join(unknown)}}
        )
    if found:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=found)


def _told(endpoint: WebhookEndpoint) -> dict[str, Any]:
    parts = urllib.parse.urlsplit(endpoint.url)
    return {
        "name": endpoint.name,
        "address": f"{parts.scheme}://{parts.netloc}",
        "kinds": endpoint.kinds,
        "department": endpoint.department.name if endpoint.department is not None else None,
        "active": endpoint.active,
    }


def webhook_create(
    *, acting_user: Actor, name: str, url: str, kinds: list[str], department: Department | None = None
) -> WebhookEndpoint:
    """Add an endpoint with a fresh secret (read it from the row, show it once). Empty `kinds`: all."""
    _require_admin(acting_user)
    name, url = name.strip(), url.strip()
    _check(name, url, kinds)
    with transaction.atomic():
        endpoint = WebhookEndpoint.objects.create(
            name=name,
            url=url,
            kinds=sorted(kinds),
            department=department,
            secret=secrets.token_urlsafe(32),
            created_at=now(),
            updated_at=now(),
        )
        audit_record(
            acting_user=acting_user, action="webhook.created", subject=endpoint, after=_told(endpoint)
        )
    return endpoint


def webhook_update(
    *,
    acting_user: Actor,
    endpoint: WebhookEndpoint,
    name: str,
    url: str,
    kinds: list[str],
    department: Department | None = None,
    active: bool = True,
) -> WebhookEndpoint:
    """Change an endpoint; the secret stays."""
    _require_admin(acting_user)
    name, url = name.strip(), url.strip()
    _check(name, url, kinds)
    with transaction.atomic():
        row = (
            WebhookEndpoint.objects.select_for_update(of=("self",))
            .select_related("department")
            .get(pk=endpoint.pk)
        )
        before = _told(row)
        advance(
            WebhookEndpoint.objects.filter(pk=row.pk),
            name=name,
            url=url,
            kinds=sorted(kinds),
            department=department,
            active=active,
        )
        row = WebhookEndpoint.objects.select_related("department").get(pk=row.pk)
        audit_record(
            acting_user=acting_user, action="webhook.changed", subject=row, before=before, after=_told(row)
        )
    return row


def webhook_remove(*, acting_user: Actor, endpoint: WebhookEndpoint) -> WebhookEndpoint:
    """Switch an endpoint off; its history stays."""
    return webhook_update(
        acting_user=acting_user,
        endpoint=endpoint,
        name=endpoint.name,
        url=endpoint.url,
        kinds=list(endpoint.kinds),
        department=endpoint.department,
        active=False,
    )


def webhook_test(*, acting_user: Actor, endpoint: WebhookEndpoint) -> Answer:
    """Post a signed test message now and note what came back."""
    _require_admin(acting_user)
    body = {
        "kind": "notify.test",
        "title": "Test",
        "created_at": now().isoformat().replace("+00:00", "Z"),
        "by": acting_user.name,
    }
    answer = post_signed(url=endpoint.url, secret=endpoint.secret, body=body, delivery="test")
    WebhookEndpoint.objects.filter(pk=endpoint.pk).update(last_status=answer.text[:100])
    return answer
