from django.apps import AppConfig


class MonitoringConfig(AppConfig):
    """What it does, and whether it is well used."""

    name = "monitoring"
    verbose_name = "Monitoring"

    def ready(self) -> None:
        """Subscribe to what the rooms below tell."""
        import monitoring.notices
        import monitoring.subscriptions  # noqa: F401
