"""System checks of the installation: production refuses insecure settings.

`manage.py check` (and migrate) shows them; the web server and the workers ask `refuse_insecure` when they start, so
that an insecure production does not come up at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured

KEY_LENGTH = 50
LOOPBACK = ("http://127.0.0.1", "http://localhost", "http://[::1]")


@register(Tags.security)
def insecure_settings(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """What must not be so in production; nothing elsewhere."""
    if settings.GPUPOOL_ENV != "production":
        return []
    found: list[CheckMessage] = []
    try:
        key = settings.SECRET_KEY
    except ImproperlyConfigured:  # Django's own refusal of an empty one
        key = ""
    if not key or key == settings.INSECURE_KEY or len(key) < KEY_LENGTH:
        found.append(
            Error(
                "GPUPOOL_SECRET_KEY is missing, known or shorter than 50 characters.",
                hint="manage.py up makes one; else set a random one.",
                id="gpupool.E001",
            )
        )
    if settings.DEBUG:
        found.append(
            Error("GPUPOOL_DEBUG is on: error pages would show settings and data.", id="gpupool.E002")
        )
    if "*" in settings.ALLOWED_HOSTS:
        found.append(
            Error(
                "GPUPOOL_ALLOWED_HOSTS allows every host name.",
                hint="Name the addresses that people use.",
                id="gpupool.E003",
            )
        )
    if settings.CELERY_TASK_ALWAYS_EAGER:
        found.append(Error("GPUPOOL_TASKS_EAGER is on: it is for tests.", id="gpupool.E004"))
    if not settings.AXES_ENABLED:
        found.append(
            Error("GPUPOOL_AXES is off: passwords could be guessed without a limit.", id="gpupool.E005")
        )
    base = settings.GPUPOOL_BASE_URL
    if not base.startswith("https://") and not base.startswith(LOOPBACK):
        found.append(
            Warning(
                "GPUPOOL_BASE_URL is plain http beyond this machine: sessions and tokens can be read on the way.",
                hint="Put a TLS proxy before it (deploy/nginx).",
                id="gpupool.W001",
            )
        )
    return found


def refuse_insecure() -> None:
    """Raise ImproperlyConfigured where an error above is found."""
    errors = [m for m in insecure_settings() if m.is_serious()]
    if errors:
        raise ImproperlyConfigured(" ".join(f"{m.id}: {m.msg}" for m in errors))
