"""What opens an outside system, sealed in the database (Fernet) with a key made from the installation's SECRET_KEY.

Written by pool administrators, read by executors alone; nothing that people see ever holds a value. A database without
its SECRET_KEY is of no use to whoever takes it; old keys (SECRET_KEY_FALLBACKS) still open what they sealed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.executors.base import TerminalFailure
from pool.models import Cluster, ClusterCredential
from pool.services.nodes import require_pool_admin
from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from portal.ops.actor import Actor
from portal.ops.services import audit_record

NAME = re.compile(r"^[a-z][a-z0-9_]{0,47}$")
MOST_CHARS = 64_000


def _keys() -> MultiFernet:
    secrets = [settings.SECRET_KEY, *getattr(settings, "SECRET_KEY_FALLBACKS", [])]
    made = [hashlib.sha256(b"cluster credential\0" + secret.encode()).digest() for secret in secrets]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in made])


def credential_set(
    *, acting_user: Actor, cluster: Cluster, name: str, value: str, expires_at: datetime | None = None
) -> None:
    """Keep a credential of a cluster under a name, in place of the one before; an empty value removes it."""
    require_pool_admin(acting_user)
    if not NAME.match(name):
        raise Invalid.field("name", _("Small letters, digits and underscores, please."))
    if len(value) > MOST_CHARS or "\0" in value:
        raise Invalid.field(name, _("This is too long for a credential."))
    with transaction.atomic():
        rows = ClusterCredential.objects.filter(cluster=cluster, name=name)
        if not value:
            if not rows.delete()[0]:
                return
        else:
            sealed = _keys().encrypt(value.encode()).decode()
            ClusterCredential.objects.update_or_create(
                cluster=cluster,
                name=name,
                defaults={
                    "sealed": sealed,
                    "set_at": now(),
                    "set_by_name": acting_user.name[:200],
                    "expires_at": expires_at,
                },
            )
        audit_record(
            acting_user=acting_user,
            action="cluster.credential_set" if value else "cluster.credential_removed",
            subject=cluster,
            after={"name": name},
        )


def credential_read(*, cluster: Cluster, name: str) -> str | None:
    """The value for an executor; None where none is kept. `TerminalFailure` (`credential_unreadable`) where it was
    sealed with a key that is gone: it must be entered again."""
    row = ClusterCredential.objects.filter(cluster=cluster, name=name).first()
    if row is None:
        return None
    try:
        return _keys().decrypt(row.sealed.encode()).decode()
    except InvalidToken as error:
        raise TerminalFailure("credential_unreadable", f"{name} must be entered again") from error


def credential_names(*, cluster: Cluster) -> dict[str, ClusterCredential]:
    """Which are kept, with who set them when; never their values."""
    return {row.name: row for row in ClusterCredential.objects.filter(cluster=cluster).defer("sealed")}
