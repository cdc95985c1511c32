"""Static files under addresses that change with their content, so that browsers may keep them for good.

`{% static "css/base.css" %}` gives `/static/~3f9c…/css/base.css`: one mark for all files, of their bytes. It is a part
of the path, not of the file's name, so that what a style or a module names relative to itself has it too. Nothing is
collected or copied: the mark is computed once a process (in the process that the others are forked from). An address
with an older mark, of a page that was open while the installation was upgraded, gives the present file for a short
time.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import StaticFilesStorage
from django.http import HttpRequest, HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware

MARKED = re.compile(r"~([0-9a-f]{12})/")
FOR_GOOD = "max-age=31536000, public, immutable"


@cache
def content_mark() -> str:
    """Twelve hexadecimal digits of every static file's name and bytes."""
    found: dict[str, str] = {}
    for finder in finders.get_finders():
        for name, storage in finder.list(None):
            found.setdefault(name, storage.path(name))
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(found):
        digest.update(name.encode() + b"\0")
        digest.update(Path(found[name]).read_bytes())
    return digest.hexdigest()


class MarkedStorage(StaticFilesStorage):
    """Addresses with the mark; plain ones while files are edited (development)."""

    def url(self, name: str | None) -> str:
        """Where a file is served."""
        if not name or settings.WHITENOISE_AUTOREFRESH:
            return super().url(name)
        return super().url(f"~{content_mark()}/{name}")


class StaticFiles(WhiteNoiseMiddleware):
    """Serves them, with or without a mark."""

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        path: str = request.path_info
        marked = MARKED.match(path, len(self.static_prefix)) if path.startswith(self.static_prefix) else None
        file = self._file(self.static_prefix + path[marked.end() :]) if marked is not None else None
        answer: HttpResponseBase = self.serve(file, request) if file else super().__call__(request)
        if file and marked is not None and marked.group(1) == content_mark():
            answer["Cache-Control"] = FOR_GOOD
        return answer

    def _file(self, url: str) -> Any:
        return self.find_file(url) if self.autorefresh else self.files.get(url)


__all__ = ["FOR_GOOD", "MarkedStorage", "StaticFiles", "content_mark"]
