"""Answers that are sent piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import AnyStr

from asgiref.sync import sync_to_async
from django.http import HttpRequest, StreamingHttpResponse


async def _one_after_the_other(pieces: Iterator[AnyStr]) -> AsyncIterator[AnyStr]:
    """Pieces read in the request's own thread, where its database connection is, while the server goes on."""
    following = sync_to_async(lambda: next(pieces, None))
    while (piece := await following()) is not None:
        yield piece


def streamed_text(request: HttpRequest, pieces: Iterator[str]) -> StreamingHttpResponse:
    """Plain text as it is read from the database. An ASGI server would otherwise hold all of it in memory first."""
    asynchronous = hasattr(request, "scope")
    return StreamingHttpResponse(
        _one_after_the_other(pieces) if asynchronous else pieces, content_type="text/plain; charset=utf-8"
    )


def streamed_bytes(request: HttpRequest, pieces: Iterator[bytes], size: int) -> StreamingHttpResponse:
    """`size` bytes as they are read from the database."""
    asynchronous = hasattr(request, "scope")
    answer = StreamingHttpResponse(
        _one_after_the_other(pieces) if asynchronous else pieces, content_type="application/octet-stream"
    )
    answer["Content-Length"] = str(size)
    answer["Content-Encoding"] = "identity"  # packed already: not to be packed again on the way
    return answer
