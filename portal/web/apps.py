"""The front door: shell, home by role, help, error pages, health."""

from __future__ import annotations

from django.apps import AppConfig


class WebConfig(AppConfig):
    """Pages that belong to no room, and the components of all pages."""

    name = "portal.web"
    label = "web"

    def ready(self) -> None:
        """Tell the rooms below what only the wiring knows: what their acts touch above, and words for incidents."""
        from portal.accounts import effects
        from portal.web import checks, incident_words, touches  # noqa: F401  (checks register themselves)

        incident_words.register_all()

        effects.register_department_effects(touches.of_departments)
        effects.register_person_effects(touches.of_people)
        effects.register_holdings(touches.held_by)
        effects.register_moved(touches.use_follows)
        effects.register_closed(touches.quota_ends)
