from django.apps import AppConfig


class OpsConfig(AppConfig):
    """Registers the ground floor's operations models."""

    name = "portal.ops"
    label = "ops"
    verbose_name = "Operations log"

    def ready(self) -> None:
        """What every connection to the database has."""
        from portal.kernel.timestamps import timestamps_fast

        timestamps_fast()
