"""Send notices: once per person, kind, subject and threshold, whatever runs twice."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from portal.accounts.models import User
from portal.accounts.policy import DepartmentTree
from portal.kernel.clock import now
from portal.kernel.ids import uuid7
from portal.notify.kinds import kind_of
from portal.notify.models import Channel, Delivery, Notification, Preference, WebhookEndpoint
from portal.notify.texts import encode
from portal.ops.outbox import load_celery

GATHER = timedelta(seconds=15)


def notify(
    *,
    user_ids: Iterable[int],
    kind: str,
    subject: Any = None,
    threshold: str = "",
    params: dict[str, Any] | None = None,
    url: str = "",
    urgent: bool = False,
) -> list[Notification]:
    """Tell people something, inside the caller's transaction; returns the notices that are new.

    `subject` is a model instance with `uid`, or (type, uid), or None (then nothing is held against a repeat).
    `threshold` tells repeats apart (`24h`, `2h`, `80`). Datetimes in `params` are shown in each reader's zone.
    `url` is a path inside the portal. Urgent ones (or those of an urgent kind) go out at once and cannot be
    muted. Inactive people get none. Mail and webhooks are sent after the transaction, by `portal.notify.deliver`.
    """
    subject_type, subject_uid = _subject(subject)
    urgent = urgent or kind_of(kind).urgent
    moment = now()
    with transaction.atomic():
        people = list(User.objects.filter(pk__in=sorted(set(user_ids)), is_active=True).order_by("pk"))
        rows = [
            Notification(
                uid=uuid7(),
                user=person,
                kind=kind,
                subject_type=subject_type,
                subject_uid=subject_uid,
                threshold=threshold,
                params=encode(params or {}),
                url=url[:300],
                urgent=urgent,
                created_at=moment,
                updated_at=moment,
            )
            for person in people
        ]
        Notification.objects.bulk_create(rows, ignore_conflicts=True)
        made = list(
            Notification.objects.filter(uid__in=[r.uid for r in rows]).select_related("user").order_by("pk")
        )
        if made:
            due = moment if urgent else moment + GATHER
            Delivery.objects.bulk_create(
                [
                    Delivery(next_at=due, **entry)
                    for entry in [*_mails(made, kind, urgent), *_posts(made, kind)]
                ],
                ignore_conflicts=True,
            )
            if urgent:
                transaction.on_commit(_poke, robust=True)
    return made


def _subject(subject: Any) -> tuple[str, uuid.UUID | None]:
    if subject is None:
        return "", None
    if isinstance(subject, tuple):
        name, uid = subject
        return str(name), uuid.UUID(str(uid))
    return subject._meta.label_lower, subject.uid


def _mails(made: list[Notification], kind: str, urgent: bool) -> list[dict[str, Any]]:
    if not settings.GPUPOOL_MAIL:
        return []
    muted: set[int] = set()
    if not urgent:
        muted = set(
            Preference.objects.filter(
                user_id__in=[n.user_id for n in made], kind=kind, channel=Channel.MAIL, enabled=False
            ).values_list("user_id", flat=True)
        )
    return [
        {"notification": n, "channel": Channel.MAIL} for n in made if n.user.email and n.user_id not in muted
    ]


def _posts(made: list[Notification], kind: str) -> list[dict[str, Any]]:
    """One post per endpoint, however many people are told: it stands with the first of them."""
    endpoints = [e for e in WebhookEndpoint.objects.filter(active=True) if not e.kinds or kind in e.kinds]
    tree = DepartmentTree.load() if any(e.department_id for e in endpoints) else None
    out: list[dict[str, Any]] = []
    for endpoint in endpoints:
        within = set(tree.subtree(endpoint.department_id)) if tree and endpoint.department_id else None
        first = next((n for n in made if within is None or n.user.home_department_id in within), None)
        if first is not None:
            out.append({"notification": first, "channel": Channel.WEBHOOK, "endpoint": endpoint})
    return out


def _poke() -> None:
    from portal.notify.tasks import deliver

    load_celery()
    deliver.apply_async(ignore_result=True, retry=False)
