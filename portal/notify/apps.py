from django.apps import AppConfig


class NotifyConfig(AppConfig):
    """Notices."""

    name = "portal.notify"
    label = "notify"
    verbose_name = "Notices"

    def ready(self) -> None:
        """Register the own kinds and listen to the rooms below."""
        import portal.notify.subscriptions  # noqa: F401
