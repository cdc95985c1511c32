from django.apps import AppConfig


class NotifyConfig(AppConfig):
    """Notices."""

    name = "portal.notify"
    label = "notify"
    verbose_name = "Notices"
