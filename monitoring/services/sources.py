"""Sources that are fetched: set by pool administrators, read on a schedule, written through the same ingest.

A fetch never holds a transaction. What it says of a card goes through the checks of an agent's row; a card that its own
agent reports is left to the agent, which sees processes too. Identity is the UUID: a card that another node's target
reports, or that two targets claim at once, is an incident and overwrites nothing.
"""

from __future__ import annotations

import urllib.parse
from datetime import timedelta
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from monitoring.models import MetricSource
from pool.models import Cluster
from pool.services.credentials import credential_set
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services import audit_record

log = structlog.get_logger(__name__)
FIELDS = ("name", "kind", "url", "query", "auth", "username", "every_s", "active")


def require_admin(acting_user: Actor) -> None:
    """Sources are set and looked at by those who administer the pool."""
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.administers_pool)


def credential_name(source: MetricSource) -> str:
    """Under which name the cluster keeps the secret of a source, sealed."""
    return f"metrics_{source.pk}"


def _problems(values: dict[str, Any], secret: str | None, kept: bool) -> list[FieldProblem]:
    found: list[FieldProblem] = []
    if not 0 < len(values["name"]) <= 80:
        found.append({"pointer": "name", "detail": _("A name of 1 to 80 characters is needed.")})
    if values["kind"] not in MetricSource.Kind.values:
        found.append({"pointer": "kind", "detail": _("Either exporter or prometheus.")})
    plain = values["url"].replace("{node}", "n").replace("{address}", "n")
    try:
        parts = urllib.parse.urlsplit(plain)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and not parts.username
        good = good and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or len(values["url"]) > 500 or "{" in plain or any(c <= " " for c in plain):
        found.append(
            {"pointer": "url", "detail": _("An http or https address without a name or password in it.")}
        )
    if values["kind"] == "prometheus" and plain != values["url"]:
        found.append({"pointer": "url", "detail": _("A Prometheus server is one address for all nodes.")})
    if len(values["query"]) > 500 or (values["query"] and values["kind"] != "prometheus"):
        found.append(
            {"pointer": "query", "detail": _("Only a Prometheus server is asked, in at most 500 characters.")}
        )
    if values["auth"] not in MetricSource.Auth.values:
        found.append({"pointer": "auth", "detail": _("One of none, bearer and basic.")})
    elif values["auth"] == "none":
        if secret:
            found.append({"pointer": "secret", "detail": _("Without sign-in there is no secret.")})
    elif not (secret or (secret is None and kept)):
        found.append({"pointer": "secret", "detail": _("A secret is needed for this kind of sign-in.")})
    if (values["auth"] == "basic") != bool(values["username"]) or len(values["username"]) > 120:
        found.append(
            {
                "pointer": "username",
                "detail": _("A name belongs to a name and password, and to nothing else."),
            }
        )
    if not 5 <= values["every_s"] <= 3600:
        found.append({"pointer": "every_s", "detail": _("From 5 to 3600 seconds.")})
    return found


def _told(source: MetricSource) -> dict[str, Any]:
    return {name: getattr(source, name) for name in FIELDS if name != "username"} | {
        "cluster": source.cluster.code
    }


def source_save(
    *,
    acting_user: Actor,
    cluster: Cluster,
    values: dict[str, Any],
    secret: str | None = None,
    source: MetricSource | None = None,
    version: int | None = None,
) -> MetricSource:
    """Add a source to a cluster, or change one (what `values` lacks stays; `secret` None keeps the one there is).

    Raises `Invalid` with the fields, `Conflict` where the name is taken or somebody else was faster.
    """
    require_admin(acting_user)
    start: dict[str, Any] = {
        "name": "", "kind": "", "url": "", "query": "", "auth": "none", "username": "", "every_s": 15, "active": True,
    }  # fmt: skip
    if source is not None:
        start |= {name: getattr(source, name) for name in FIELDS}
        cluster = source.cluster
    wanted = start | values
    for name in ("name", "url", "query", "username"):
        wanted[name] = str(wanted[name]).strip()
    problems = _problems(wanted, secret, kept=source is not None and source.auth != "none")
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    with transaction.atomic():
        taken = MetricSource.objects.filter(name=wanted["name"])
        if taken.exclude(pk=source.pk if source else None).exists():
            raise Conflict(code="name_taken", detail=_("There is a source of that name already."))
        before = _told(source) if source is not None else None
        if source is None:
            made = MetricSource.objects.create(cluster=cluster, **wanted)
        else:
            rows = MetricSource.objects.filter(pk=source.pk, version=version or source.version)
            # What was heard before the change says nothing of the source as it is now
            if not advance(rows, due_at=None, last_at=None, last_code="", **wanted):
                raise Conflict(code="changed", detail=_("It was changed meanwhile."))
            made = MetricSource.objects.select_related("cluster").get(pk=source.pk)
        if wanted["auth"] == "none" or secret:
            credential_set(
                acting_user=acting_user, cluster=made.cluster, name=credential_name(made), value=secret or ""
            )
        audit_record(
            acting_user=acting_user,
            action="metric_source.changed" if before else "metric_source.added",
            subject=made,
            before=before,
            after=_told(made),
        )
    return made


def source_hasten(*, acting_user: Actor, source: MetricSource) -> None:
    """Let it be fetched at the next turn."""
    require_admin(acting_user)
    MetricSource.objects.filter(pk=source.pk, active=True).update(due_at=None)


def sources_claim(*, limit: int = 50) -> list[int]:
    """Ids of sources that are due now, each given to one caller: its next time is set before it is fetched."""
    moment = now()
    with transaction.atomic():
        rows = list(
            MetricSource.objects.select_for_update(skip_locked=True)
            .filter(Q(due_at=None) | Q(due_at__lte=moment), active=True)
            .order_by("due_at", "id")[:limit]
        )
        for row in rows:
            MetricSource.objects.filter(pk=row.pk).update(due_at=moment + timedelta(seconds=row.every_s))
    return [row.pk for row in rows]


def source_result(*, source_id: int, code: str, facts: dict[str, Any]) -> None:
    """Note how the last fetch went, and since when none went well."""
    moment = now()
    changes: dict[str, Any] = {"last_at": moment, "last_code": code[:32], "last_facts": facts}
    with transaction.atomic():
        row = MetricSource.objects.select_for_update(no_key=True).get(pk=source_id)
        if code == "ok":
            changes["last_ok_at"] = moment
        else:
            since = row.last_facts.get("failing_since") if row.last_code else None
            changes["last_facts"] = {**facts, "failing_since": since or moment.isoformat()}
        MetricSource.objects.filter(pk=source_id).update(**changes)
