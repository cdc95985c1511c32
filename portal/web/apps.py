"""The front door: shell, home by role, help, error pages, health."""

from __future__ import annotations

from django.apps import AppConfig


class WebConfig(AppConfig):
    """Pages that belong to no room, and the components of all pages."""

    name = "portal.web"
    label = "web"
