"""Models of portal.notify."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Notification(PublicModel):
    """One notice to one person. Text is made from `kind` and `params` in the reader's language when shown.

    `threshold` tells repeated kinds apart (e.g. lease ends in 24h, 2h): (user, kind, subject, threshold) is
    unique, so a sweep that runs twice sends nothing twice.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="notifications")
    kind = models.CharField(max_length=48)
    subject_type = models.CharField(max_length=48, blank=True)
    subject_uid = models.UUIDField(null=True)
    threshold = models.CharField(max_length=32, blank=True)
    params = models.JSONField(default=dict)
    url = models.CharField(max_length=300, blank=True, help_text="path inside the portal")
    urgent = models.BooleanField(default=False, help_text="security and reclaim warnings: cannot be muted")
    read_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["user", "kind", "subject_uid", "threshold"],
                nulls_distinct=True,
                name="notification_once_per_threshold",
            ),
        ]
        indexes = [
            models.Index(fields=["user", "-id"], name="notification_user"),
            models.Index(fields=["user"], name="notification_unread", condition=models.Q(read_at=None)),
        ]

    def __str__(self) -> str:
        return f"{self.kind} → {self.user_id}"


class Channel(models.TextChoices):
    """Ways a notice leaves the page."""

    MAIL = "mail", _("Mail")
    WEBHOOK = "webhook", _("Webhook")


class Delivery(models.Model):
    """One notice through one channel, tried until sent or given up."""

    id = models.BigAutoField(primary_key=True)
    notification = models.ForeignKey(Notification, on_delete=models.PROTECT, related_name="deliveries")
    channel = models.CharField(max_length=12, choices=Channel.choices)
    endpoint = models.ForeignKey("notify.WebhookEndpoint", on_delete=models.PROTECT, null=True, blank=True)
    attempts = models.PositiveSmallIntegerField(default=0)
    next_at = models.DateTimeField(default=now)
    sent_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["notification", "channel", "endpoint"], nulls_distinct=False, name="delivery_once"
            ),
        ]
        indexes = [
            models.Index(
                fields=["next_at"], name="delivery_due", condition=models.Q(sent_at=None, failed_at=None)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.channel} {self.notification_id}"


class Preference(models.Model):
    """A person's choice per kind of notice and channel; absent means on."""

    id = models.BigAutoField(primary_key=True)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="notice_preferences"
    )
    kind = models.CharField(max_length=48)
    channel = models.CharField(max_length=12, choices=Channel.choices)
    enabled = models.BooleanField(default=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "kind", "channel"], name="preference_once")]

    def __str__(self) -> str:
        return f"{self.user_id} {self.kind} {self.channel}"


class WebhookEndpoint(PublicModel):
    """Where notices of some kinds are posted, signed with HMAC-SHA256 over timestamp and body."""

    name = models.CharField(max_length=80)
    url = models.URLField(max_length=500)
    secret = models.CharField(max_length=128)
    kinds = models.JSONField(default=list, help_text="empty: all kinds")
    department = models.ForeignKey("accounts.Department", on_delete=models.PROTECT, null=True, blank=True)
    active = models.BooleanField(default=True)
    last_status = models.CharField(max_length=100, blank=True)

    def __str__(self) -> str:
        return self.name


__all__ = ["Channel", "Delivery", "Notification", "Preference", "WebhookEndpoint"]
