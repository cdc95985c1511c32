"""The stock data admin: notices and their deliveries to look at."""

from __future__ import annotations

from django.contrib import admin

from portal.notify.models import Delivery, Notification
from portal.ops.admin import ReadOnly


@admin.register(Notification)
class NotificationAdmin(ReadOnly):
    """Notices."""

    list_display = ("created_at", "user", "kind", "threshold", "urgent", "read_at")
    list_filter = ("kind", "urgent")
    list_select_related = ("user",)


@admin.register(Delivery)
class DeliveryAdmin(ReadOnly):
    """Deliveries."""

    list_display = ("id", "channel", "attempts", "next_at", "sent_at", "failed_at", "last_error")
    list_filter = ("channel",)
