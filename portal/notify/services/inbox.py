"""A person's own notices: read, and which kinds reach them by which channel."""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.errors import Invalid, NotFound
from portal.notify.kinds import kind_of, known
from portal.notify.models import Channel, Notification, Preference
from portal.ops.actor import Actor


def mark_read(*, acting_user: Actor, notice: Notification) -> Notification:
    """Mark one's own notice as read; anothers' looks as if it were not there."""
    if acting_user.user_id != notice.user_id:
        raise NotFound(code="not_found", detail=_("There is no such notice."))
    moment = now()
    Notification.objects.filter(pk=notice.pk, read_at=None).update(read_at=moment, updated_at=moment)
    notice.refresh_from_db()
    return notice


def mark_all_read(*, acting_user: Actor) -> int:
    """Mark all of one's own notices as read; returns how many were new."""
    moment = now()
    return Notification.objects.filter(user_id=acting_user.user_id, read_at=None).update(
        read_at=moment, updated_at=moment
    )


def preferences_save(*, acting_user: Actor, mail_off: set[str]) -> None:
    """Set the kinds that shall not come by mail. Errors: `Invalid` ``cannot_be_muted`` for an urgent kind,
    ``unknown_kind``."""
    names = {k.name for k in known()}
    for name in sorted(mail_off):
        if name not in names:
            raise Invalid.field(name, _("There is no such kind of notice."), code="unknown_kind")
        if kind_of(name).urgent:
            raise Invalid.field(name, _("Urgent notices cannot be muted."), code="cannot_be_muted")
    with transaction.atomic():
        Preference.objects.filter(user_id=acting_user.user_id, channel=Channel.MAIL).delete()
        Preference.objects.bulk_create(
            Preference(user_id=acting_user.user_id, kind=name, channel=Channel.MAIL, enabled=False)
            for name in sorted(mail_off)
        )
