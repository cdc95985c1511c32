"""People."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, PermissionsMixin, UserManager
from django.core.validators import RegexValidator
from django.db import models
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.ids import uuid7


class User(AbstractBaseUser, PermissionsMixin):
    """A person. Never deleted: a person who left is inactive, and history keeps the name."""

    class Theme(models.TextChoices):
        SYSTEM = "system", _("Like the device")
        LIGHT = "light", _("Light")
        DARK = "dark", _("Dark")

    id = models.BigAutoField(primary_key=True)
    uid = models.UUIDField(default=uuid7, unique=True, editable=False)
    username = models.CharField(
        _("user name"),
        max_length=64,
        unique=True,
        validators=[
            RegexValidator(r"^[a-z0-9][a-z0-9._-]*$", _("Small letters, digits, dot, dash and underscore."))
        ],
    )
    display_name = models.CharField(_("name"), max_length=120)
    email = models.EmailField(_("mail"), blank=True)
    home_department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="members"
    )
    system_account = models.CharField(
        _("account on nodes"), max_length=32, blank=True, help_text=_("Empty: the same as the user name.")
    )
    language = models.CharField(_("language"), max_length=10, default="zh-hans")
    time_zone = models.CharField(
        _("time zone"), max_length=64, blank=True, help_text=_("Empty: that of the site.")
    )
    theme = models.CharField(_("theme"), max_length=8, choices=Theme.choices, default=Theme.SYSTEM)
    is_active = models.BooleanField(_("active"), default=True)
    is_staff = models.BooleanField(_("may use the data admin"), default=False)
    must_change_password = models.BooleanField(default=False)
    date_joined = models.DateTimeField(default=now)
    suspended_at = models.DateTimeField(null=True, blank=True)
    session_generation = models.PositiveIntegerField(
        default=0, editable=False, help_text="raised to end all open sessions of this person"
    )
    version = models.PositiveIntegerField(default=1, editable=False)

    objects = UserManager()

    USERNAME_FIELD = "username"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS = ["display_name", "email"]

    class Meta:
        indexes = [models.Index(fields=["display_name"], name="user_name")]

    def __str__(self) -> str:
        return self.display_name or self.username

    def get_full_name(self) -> str:
        """The name shown to others."""
        return self.display_name or self.username

    def get_short_name(self) -> str:
        """The name in narrow places."""
        return self.display_name or self.username

    def get_session_auth_hash(self) -> str:
        """What ties sessions to this person's state: a new password or generation ends them all."""
        return self._session_hash(None)

    def get_session_auth_fallback_hash(self) -> Iterator[str]:
        """The same under older secret keys, while a key is being changed."""
        for secret in settings.SECRET_KEY_FALLBACKS:
            yield self._session_hash(secret)

    def _session_hash(self, secret: str | bytes | None) -> str:
        value = f"{self.password}:{self.session_generation}"
        return salted_hmac("portal.accounts.session", value, secret=secret, algorithm="sha256").hexdigest()

    @property
    def node_account(self) -> str:
        """The system account that this person's work runs as on nodes."""
        return self.system_account or self.username
