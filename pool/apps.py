from django.apps import AppConfig


class PoolConfig(AppConfig):
    """What there is, and who has it now."""

    name = "pool"
    verbose_name = "Pool"

    def ready(self) -> None:
        """Subscribe to what the rooms below tell."""
        import pool.notices
        import pool.reclaim_events
        import pool.subscriptions  # noqa: F401
