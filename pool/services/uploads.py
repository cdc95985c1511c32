"""Project folders sent with a request: looked at, kept in the database, handed to the node that runs it, let go.

An upload comes before its request and is bound to it by the client token that both carry, so that what runs is what was
there when the request was made: once the request stands, another content is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import BinaryIO

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, Sum
from django.utils.translation import gettext as _

from pool.agent import archive
from pool.models import AllocationMember, WorkUpload, WorkUploadPiece
from portal.accounts.models import User
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Conflict, DomainError, Invalid
from portal.ops.actor import Actor
from portal.ops.services import audit_record
from quotas.models import CapacityRequest

MIB = 1024 * 1024
MOST_BYTES = 64 * MIB
"""Packed; unpacked it is `archive.Limits`."""
MOST_OF_ONE_PERSON = 512 * MIB
PIECE = 256 * 1024
TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")
KEPT_WITHOUT_REQUEST = timedelta(days=1)
S = CapacityRequest.State
OVER = (S.ENDED, S.REJECTED, S.WITHDRAWN)


def upload_keep(*, acting_user: Actor, client_token: str, source: BinaryIO) -> WorkUpload:
    """Keep a packed folder for the request of this token; the same bytes again change nothing.

    Errors: `Invalid` with the archive's code (`path_outside`, `entry_refused`, …) or `client_token`; 413
    `upload_too_large`; `Blocked` `uploads_full`; `Conflict` `upload_too_late` where its request stands already.
    """
    if not TOKEN.fullmatch(client_token):
        raise Invalid.field("client_token", _("8 to 64 letters, digits, dots, dashes and underscores."))
    size, digest = _measured(source)
    try:
        summary = archive.check(source, archive.Limits())
    except archive.BadArchive as bad:
        raise Invalid(
            code=bad.code, detail=_("The folder is not taken: %(why)s.") % {"why": bad.detail}
        ) from bad
    user = acting_user.user
    assert isinstance(user, User)
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        found = WorkUpload.objects.filter(owner=user, client_token=client_token).first()
        if found is not None and found.sha256 == digest:
            return found
        stands = CapacityRequest.objects.filter(requester=user, client_token=client_token)
        if stands.exclude(state=S.DRAFT).exists():
            raise Conflict(
                code="upload_too_late",
                detail=_("The request of this folder stands already; send the folder with a new one."),
            )
        if found is not None:
            found.delete()
        used = WorkUpload.objects.filter(owner=user).aggregate(n=Sum("size"))["n"] or 0
        if used + size > MOST_OF_ONE_PERSON:
            raise Blocked(
                code="uploads_full",
                detail=_("Your kept folders would take more than %(most)d MiB. Wait until some work is over.")
                % {"most": MOST_OF_ONE_PERSON // MIB},
                blocking={"level": "user", "limit": MOST_OF_ONE_PERSON, "used": used, "requested": size},
            )
        made = WorkUpload.objects.create(
            owner=user, client_token=client_token, sha256=digest, size=size, files=summary.files,
            unpacked=summary.bytes,
        )  # fmt: skip
        _write(made, source)
        audit_record(
            acting_user=acting_user,
            action="upload.kept",
            subject=made,
            after={"files": made.files, "size": size, "sha256": digest},
        )
    return made


def _measured(source: BinaryIO) -> tuple[int, str]:
    seen, size = hashlib.sha256(), 0
    source.seek(0)
    while data := source.read(PIECE):
        size += len(data)
        if size > MOST_BYTES:
            raise too_large()
        seen.update(data)
    source.seek(0)
    return size, seen.hexdigest()


def too_large() -> DomainError:
    """The refusal of a body past the limit."""
    return DomainError(
        code="upload_too_large",
        detail=_("At most %(most)d MiB, packed. Leave out data sets and results (.gpupoolignore).")
        % {"most": MOST_BYTES // MIB},
        status=413,
    )


def _write(upload: WorkUpload, source: BinaryIO) -> None:
    source.seek(0)
    number = 0
    while data := source.read(PIECE):
        WorkUploadPiece.objects.create(upload=upload, number=number, data=data)
        number += 1


def upload_of(request: CapacityRequest) -> WorkUpload | None:
    """The folder that a request (or the series it belongs to) was sent with."""
    head = request.head or request
    if not head.client_token:
        return None
    return WorkUpload.objects.filter(owner_id=head.requester_id, client_token=head.client_token).first()


def upload_for_node(*, node_id: int, uid: str) -> WorkUpload | None:
    """An upload that this node may fetch: work that it belongs to is to run there now."""
    found = WorkUpload.objects.filter(uid=uid).first()
    if found is None:
        return None
    own = Q(allocation__request__client_token=found.client_token)
    of_head = Q(allocation__request__head__client_token=found.client_token)
    held = AllocationMember.objects.filter(
        own | of_head, node_id=node_id, allocation__request__requester_id=found.owner_id
    ).exclude(allocation__state="ended")
    return found if held.exists() else None


def upload_bytes(upload: WorkUpload) -> Iterator[bytes]:
    """Its pieces in order."""
    for data in upload.pieces.order_by("number").values_list("data", flat=True).iterator(chunk_size=4):
        yield bytes(data)


def uploads_tidy() -> int:
    """Let go what no request needs any more: its request is over, or never came within a day."""
    same = CapacityRequest.objects.filter(
        requester_id=OuterRef("owner_id"), client_token=OuterRef("client_token")
    )
    rows = WorkUpload.objects.annotate(
        needed=Exists(same.exclude(state__in=OVER)), asked=Exists(same)
    ).filter(needed=False)
    done = 0
    for row in rows.filter(Q(asked=True) | Q(created_at__lt=now() - KEPT_WITHOUT_REQUEST)).order_by("id")[
        :500
    ]:
        row.delete()
        done += 1
    return done
