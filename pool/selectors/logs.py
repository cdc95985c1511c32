"""Output of running work, read back in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.utils.translation import gettext as _

from pool.models import AllocationLog
from portal.kernel.errors import Invalid

TAIL_CHARS = 16_000
LAST_MEMBER = 9999
PIECES_AT_ONCE = 32


def member_asked(text: str) -> int:
    """The rank in a gang that a query string names; the first where it names none, Invalid where it is none."""
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= LAST_MEMBER):
        raise Invalid.field("member", _("A whole number from 0 on is needed here."))
    return int(text)


@dataclass(frozen=True)
class Tail:
    """The last lines of an output. `size` is its length in bytes as far as it is known here."""

    lines: list[str]
    size: int
    more: bool


def log_tail(*, allocation_id: int, member: int, chars: int = TAIL_CHARS) -> Tail:
    """The last `chars` characters, cut at a line's start."""
    pieces: list[str] = []
    got = size = 0
    newest = AllocationLog.objects.filter(allocation_id=allocation_id, member=member).order_by("-offset")
    more = False
    for piece in newest.values_list("offset", "data").iterator(chunk_size=8):
        if not pieces:
            size = piece[0] + len(piece[1].encode())
        pieces.append(piece[1])
        got += len(piece[1])
        if got >= chars:
            more = piece[0] > 0 or got > chars
            break
    text = "".join(reversed(pieces))
    if got > chars:
        text = text[-chars:]
        text = text[text.find("\n") + 1 :]
        more = True
    return Tail(lines=text.splitlines(), size=size, more=more)


def log_after(*, allocation_id: int, member: int, after: int) -> list[dict[str, int | str]]:
    """The next pieces after the one at offset `after` (-1: from the start): offset in bytes, and text."""
    rows = AllocationLog.objects.filter(allocation_id=allocation_id, member=member, offset__gt=after)
    return [{"offset": row.offset, "text": row.data} for row in rows.order_by("offset")[:PIECES_AT_ONCE]]


def log_pieces(*, allocation_id: int, member: int) -> Iterator[str]:
    """The whole kept output, piece by piece, in order."""
    rows = AllocationLog.objects.filter(allocation_id=allocation_id, member=member).order_by("offset")
    yield from rows.values_list("data", flat=True).iterator(chunk_size=16)
