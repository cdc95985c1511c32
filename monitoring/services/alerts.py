"""Alert rules: made and changed by pool administrators, evaluated by a task, told once per opening.

All subjects of a rule are collected in one incident, so that a hot room of a thousand cards is one message. The
incident closes by itself when none of them is beyond the threshold any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.utils.translation import gettext_lazy as _

from monitoring.engine.alerts import Firing, Step, steps
from monitoring.models import AlertFiring, AlertRule
from monitoring.selectors.alert_values import Subject, values_of
from pool.models import Lease
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid, PreconditionFailed
from portal.kernel.models import advance
from portal.kernel.units import to_ms
from portal.ops.actor import Actor
from portal.ops.models import Incident
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record, incident_open, incident_resolve

_LOCK = 7_301_014
FIELDS = (
    "name",
    "metric",
    "direction",
    "threshold",
    "for_s",
    "severity",
    "site_code",
    "tell_holder",
    "active",
)
MOST_NAMED = 50
LEAST = -10_000_000


def alert_rule_save(
    *,
    acting_user: Actor,
    policy: Policy,
    values: Mapping[str, Any],
    rule: AlertRule | None = None,
    seen_version: int | None = None,
) -> AlertRule:
    """Make a rule, or change the given fields of one. Invalid for values out of bounds, Conflict for a name in use."""
    policy.require(policy.administers_pool)
    with transaction.atomic():
        row = AlertRule() if rule is None else AlertRule.objects.select_for_update().get(pk=rule.pk)
        if rule is not None and seen_version is not None and row.version != seen_version:
            raise PreconditionFailed(
                code="version_changed",
                detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
                extra={"current_version": row.version},
            )
        before = {name: getattr(row, name) for name in FIELDS} if rule is not None else {}
        for name in FIELDS:
            if name in values:
                setattr(row, name, values[name])
        row.name = row.name.strip()
        row.changed_by_name = acting_user.name
        _check(row)
        try:
            with transaction.atomic():
                if rule is None:
                    row.save()
                else:
                    changes = {name: getattr(row, name) for name in (*FIELDS, "changed_by_name")}
                    advance(AlertRule.objects.filter(pk=row.pk), **changes)
        except IntegrityError as error:
            raise Conflict(code="name_taken", detail=_("A rule of this name is there already.")) from error
        row.refresh_from_db()
        if rule is not None and _measured_otherwise(before, row):
            _end_all(row, "rule_changed")
        audit_record(
            acting_user=acting_user,
            action="alert_rule.made" if rule is None else "alert_rule.changed",
            subject=row,
            before=before,
            after={name: getattr(row, name) for name in FIELDS},
        )
    return row


def _check(row: AlertRule) -> None:
    try:
        row.clean_fields()
        if row.threshold < LEAST:
            raise ValidationError({"threshold": _("It is too small.")})
    except ValidationError as error:
        problems: list[FieldProblem] = [
            {"pointer": name, "detail": str(text)}
            for name, texts in error.message_dict.items()
            for text in texts
        ]
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems) from error


def _measured_otherwise(before: Mapping[str, Any], row: AlertRule) -> bool:
    return any(
        before[name] != getattr(row, name)
        for name in ("metric", "direction", "threshold", "site_code", "active")
    )


def _incident_key(rule: AlertRule) -> str:
    return f"alert:{rule.uid}"


def _end_all(rule: AlertRule, why: str) -> None:
    AlertFiring.objects.filter(rule=rule, closed_at=None).update(closed_at=now())
    incident_resolve(dedupe_key=_incident_key(rule), note=why)


def alerts_evaluate() -> dict[str, int]:
    """Evaluate all active rules; returns how many firings were opened and ended. One run at a time."""
    done = {"opened": 0, "ended": 0}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
            if not cursor.fetchone()[0]:
                return done
        rules = list(AlertRule.objects.filter(active=True).order_by("id"))
        if not rules:
            return done
        at = now()
        found = values_of({rule.metric for rule in rules})
        firings: dict[int, dict[str, AlertFiring]] = {}
        for row in AlertFiring.objects.filter(rule__in=rules, closed_at=None).select_for_update():
            firings.setdefault(row.rule_id, {})[row.subject_key] = row
        for rule in rules:
            opened, ended = _apply(rule, found[rule.metric], firings.get(rule.pk, {}), at)
            done["opened"] += opened
            done["ended"] += ended
        AlertRule.objects.filter(pk__in=[rule.pk for rule in rules]).update(evaluated_at=at)
    return done


def _apply(
    rule: AlertRule, subjects: Mapping[str, Subject], rows: dict[str, AlertFiring], at: datetime
) -> tuple[int, int]:
    chosen = {key: s for key, s in subjects.items() if not rule.site_code or s.site in ("", rule.site_code)}
    plan = steps(
        {key: s.value for key, s in chosen.items()},
        {key: Firing(to_ms(r.pending_since), r.opened_at is not None, r.worst) for key, r in rows.items()},
        threshold=rule.threshold,
        direction=rule.direction,
        for_ms=rule.for_s * 1000,
        now_ms=to_ms(at),
    )
    fresh: list[AlertFiring] = []
    changed: list[AlertFiring] = []
    opened: list[AlertFiring] = []
    ended = 0
    for key, step in plan.items():
        row = rows.get(key)
        if row is None:
            row = AlertFiring(rule=rule, subject_key=key, label=chosen[key].label[:200], value=0, worst=0)
            row.pending_since = at
            fresh.append(row)
        else:
            changed.append(row)
        row.value, row.worst = step.value, step.worst
        if step.act == "open":
            row.opened_at = at
            opened.append(row)
        elif step.act == "end":
            row.closed_at = at
            ended += row.opened_at is not None
    AlertFiring.objects.bulk_create(fresh, batch_size=1000)
    AlertFiring.objects.bulk_update(changed, ["value", "worst", "opened_at", "closed_at"], batch_size=1000)
    _tell(rule, opened, ended, plan)
    return len(opened), ended


def _tell(rule: AlertRule, opened: list[AlertFiring], ended: int, plan: Mapping[str, Step]) -> None:
    """The rule's incident: opened or added to by new firings, closed when none is left."""
    if opened:
        standing = AlertFiring.objects.filter(rule=rule, closed_at=None, opened_at__isnull=False)
        names = list(standing.order_by("id").values_list("label", flat=True))
        incident_open(
            kind="alert",
            dedupe_key=_incident_key(rule),
            severity=rule.severity,
            subject=rule,
            facts={
                "rule": rule.name,
                "metric": rule.metric,
                "threshold": f"{rule.direction} {rule.threshold}",
                "for_s": rule.for_s,
                "subjects": len(names),
                "which": names[:MOST_NAMED],
                "worst": max((plan[row.subject_key].worst for row in opened), default=None),
            },
        )
        outbox_add(
            "monitoring.alert_opened",
            {
                "rule": str(rule.uid),
                "firings": [[row.pk, row.subject_key] for row in opened[:1000]],
            },
            key=f"alert:{rule.pk}",
        )
    elif (
        ended and not AlertFiring.objects.filter(rule=rule, closed_at=None, opened_at__isnull=False).exists()
    ):
        incident_resolve(dedupe_key=_incident_key(rule), note="no longer beyond the threshold")


def alert_holders(*, firings: list[list[Any]]) -> dict[int, tuple[int, str]]:
    """Firing id → (holder, allocation uid) of the cards among the subjects that somebody holds now."""
    cards = {int(key[2:]): pk for pk, key in firings if str(key).startswith("g:")}
    leases = Lease.objects.filter(gpu_id__in=cards, ended_at=None).order_by("id")
    return {
        cards[gpu_id]: (holder, str(uid))
        for gpu_id, holder, uid in leases.values_list("gpu_id", "allocation__holder_id", "allocation__uid")
    }


def open_incident(rule: AlertRule) -> Incident | None:
    """The incident that collects what the rule finds now."""
    return Incident.objects.filter(dedupe_key=_incident_key(rule)).exclude(state="closed").first()
