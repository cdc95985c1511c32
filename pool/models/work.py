"""Project folders that people send with a request, to be unpacked where it runs."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from portal.kernel.models import PublicModel


class WorkUpload(PublicModel):
    """One packed folder (tar.gz). It belongs to the request of the same owner and `client_token`, which may come
    after it. Kept in the database, as everything is, until its request is over."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="work_uploads")
    client_token = models.CharField(max_length=64)
    sha256 = models.CharField(max_length=64)
    size = models.PositiveIntegerField(help_text="bytes as sent")
    files = models.PositiveIntegerField()
    unpacked = models.BigIntegerField(help_text="bytes unpacked")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "client_token"], name="work_upload_once"),
            models.CheckConstraint(condition=~Q(client_token=""), name="work_upload_named"),
        ]
        indexes = [models.Index(fields=["created_at"], name="work_upload_age")]

    def __str__(self) -> str:
        return f"{self.client_token} ({self.files} files)"


class WorkUploadPiece(models.Model):
    """A piece of the bytes, in order of `number`."""

    id = models.BigAutoField(primary_key=True)
    upload = models.ForeignKey(WorkUpload, on_delete=models.CASCADE, related_name="pieces")
    number = models.PositiveIntegerField()
    data = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["upload", "number"], name="work_piece_once")]

    def __str__(self) -> str:
        return f"{self.upload_id}[{self.number}]"
