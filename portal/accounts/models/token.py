"""API tokens: only the hash is kept, the value is shown once."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.kernel.models import PublicModel


class ApiToken(PublicModel):
    """A person's token. Scopes: `read`, `request` (ask and release), `approve`, `admin`; never more than the
    person's own roles allow."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="api_tokens")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12, help_text="first characters, to tell tokens apart")
    hash = models.CharField(max_length=64, unique=True, help_text="SHA-256 of the value")
    scopes = models.JSONField(default=list)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["user", "-id"], name="token_user")]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"
