"""Services of portal.notify."""

from portal.notify.services.deliver import deliver_due
from portal.notify.services.inbox import mark_all_read, mark_read, preferences_save
from portal.notify.services.notices import notify
from portal.notify.services.webhooks import webhook_create, webhook_remove, webhook_test, webhook_update

__all__ = [
    "deliver_due",
    "mark_all_read",
    "mark_read",
    "notify",
    "preferences_save",
    "webhook_create",
    "webhook_remove",
    "webhook_test",
    "webhook_update",
]
