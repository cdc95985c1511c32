"""Carry notices out: claim what is due, send outside of any transaction, note the outcome.

A claim moves `next_at` forward, so that two workers never hold one delivery; a worker that dies leaves it due
again after the claim's time. Mails of one kind to one person that are due together become one message.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import groupby

import structlog
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import F
from django.utils.translation import gettext

from portal.kernel.clock import now
from portal.notify.models import Channel, Delivery, WebhookEndpoint
from portal.notify.services.signing import Answer, post_signed, webhook_body
from portal.notify.texts import absolute, reading_as, subject_line, words_of

log = structlog.get_logger(__name__)
CLAIM = timedelta(minutes=5)
MAX_ATTEMPTS = 8
FIRST_PAUSE_S = 30
LONGEST_PAUSE_S = 3600


def deliver_due(*, limit: int = 200) -> int:
    """Send up to `limit` due deliveries; returns how many were sent."""
    claimed = _claim(limit)
    sent = 0
    mails = [d for d in claimed if d.channel == Channel.MAIL]
    for _key, group in groupby(mails, key=lambda d: (d.notification.user_id, d.notification.kind)):
        sent += _send_mail(list(group))
    for delivery in claimed:
        if delivery.channel == Channel.WEBHOOK:
            sent += _send_post(delivery)
    return sent


def _claim(limit: int) -> list[Delivery]:
    moment = now()
    with transaction.atomic():
        ids = list(
            Delivery.objects.select_for_update(skip_locked=True)
            .filter(sent_at=None, failed_at=None, next_at__lte=moment)
            .order_by("next_at", "id")
            .values_list("id", flat=True)[:limit]
        )
        Delivery.objects.filter(pk__in=ids).update(next_at=moment + CLAIM, attempts=F("attempts") + 1)
    return list(
        Delivery.objects.filter(pk__in=ids)
        .select_related("notification__user", "endpoint")
        .order_by("notification__user_id", "notification__kind", "id")
    )


def _done(deliveries: list[Delivery]) -> None:
    Delivery.objects.filter(pk__in=[d.pk for d in deliveries]).update(sent_at=now(), last_error="")


def pause_s(attempts: int) -> int:
    """Seconds until the next try after `attempts` failed ones: 30, 60, 120, … at most an hour."""
    return int(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (max(1, attempts) - 1)))


def _failed(deliveries: list[Delivery], error: str) -> None:
    moment = now()
    for delivery in deliveries:
        over = delivery.attempts >= MAX_ATTEMPTS
        Delivery.objects.filter(pk=delivery.pk).update(
            last_error=error[:300],
            failed_at=moment if over else None,
            next_at=moment + timedelta(seconds=pause_s(delivery.attempts)),
        )
        log.warning(
            "notice_not_delivered",
            channel=delivery.channel,
            delivery=delivery.pk,
            attempts=delivery.attempts,
            given_up=over,
        )


def _give_up(deliveries: list[Delivery], why: str) -> None:
    Delivery.objects.filter(pk__in=[d.pk for d in deliveries]).update(failed_at=now(), last_error=why)


def _send_mail(deliveries: list[Delivery]) -> int:
    person = deliveries[0].notification.user
    if not person.is_active or not person.email:
        _give_up(deliveries, "no address")
        return 0
    with reading_as(person):
        parts = []
        for delivery in deliveries:
            words = words_of(delivery.notification)
            link = absolute(delivery.notification.url)
            parts.append("\n".join(p for p in (words.title, words.body, link) if p))
        subject = subject_line(words_of(deliveries[0].notification), len(deliveries) - 1)
        foot = gettext("You get this because it concerns you. What reaches you where: %(url)s") % {
            "url": absolute("/notices/preferences/")
        }
    message = EmailMessage(
        subject=subject,
        body="\n\n".join([*parts, f"--\n{foot}"]),
        to=[f"{_header(person.get_full_name())} <{person.email}>"],
    )
    try:
        message.send()
    except Exception as error:  # a mail server fails in many ways; each is tried again
        _failed(deliveries, f"{type(error).__name__}: {error}")
        return 0
    _done(deliveries)
    return len(deliveries)


def _header(name: str) -> str:
    plain = name.replace("\\", " ").replace('"', " ").replace("\r", " ").replace("\n", " ")
    return f'"{plain}"'


def _send_post(delivery: Delivery) -> int:
    endpoint = delivery.endpoint
    if endpoint is None or not endpoint.active:
        _give_up([delivery], "the endpoint is switched off")
        return 0
    answer: Answer = post_signed(
        url=endpoint.url,
        secret=endpoint.secret,
        body=webhook_body(delivery.notification),
        delivery=str(delivery.pk),
    )
    WebhookEndpoint.objects.filter(pk=endpoint.pk).update(last_status=answer.text[:100])
    if answer.ok:
        _done([delivery])
        return 1
    _failed([delivery], answer.text)
    return 0
