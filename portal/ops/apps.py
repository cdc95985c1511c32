from django.apps import AppConfig


class OpsConfig(AppConfig):
    """Registers the ground floor's operations models."""

    name = "portal.ops"
    label = "ops"
    verbose_name = "Operations log"
