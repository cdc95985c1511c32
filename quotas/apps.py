from django.apps import AppConfig


class QuotasConfig(AppConfig):
    """Who may have how much, who asked, who agreed, what it costs."""

    name = "quotas"
    verbose_name = "Quotas"

    def ready(self) -> None:
        """Subscribe to what the rooms below tell."""
        import quotas.checks
        import quotas.notices
        import quotas.notices_money  # noqa: F401
        import quotas.subscriptions  # noqa: F401
