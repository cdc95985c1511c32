"""Static files: addresses that change with the content, kept for good; older ones served for a short time."""

from __future__ import annotations

import re

from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import staticfiles_storage
from django.test import Client

from portal.web.static import FOR_GOOD, content_mark


def body(answer: object) -> bytes:
    return b"".join(answer.streaming_content)  # type: ignore[attr-defined]


def test_an_address_with_the_mark_may_be_kept_for_good() -> None:
    url = staticfiles_storage.url("css/base.css")
    assert re.fullmatch(r"/static/~[0-9a-f]{12}/css/base\.css", url)
    answer = Client().get(url)
    assert (answer.status_code, answer["Cache-Control"]) == (200, FOR_GOOD)
    with open(str(finders.find("css/base.css")), "rb") as file:
        assert body(answer) == file.read()


def test_an_older_mark_and_none_give_the_present_file_for_a_short_time() -> None:
    for url in ("/static/~0123456789ab/css/base.css", "/static/css/base.css"):
        answer = Client().get(url)
        assert (answer.status_code, answer["Cache-Control"]) == (200, "max-age=60, public")
    for url in (f"/static/~{content_mark()}/css/none.css", f"/static/~{content_mark()}/../manage.py"):
        assert Client().get(url).status_code == 404


def test_every_file_that_a_style_or_module_names_is_relative_to_it() -> None:
    """Else it would lie outside the mark and be kept too short or too long."""
    for name in ("js/app.mjs", "css/base.css"):
        path = finders.find(name)
        assert isinstance(path, str)
        with open(path, encoding="utf-8") as file:
            assert "/static/" not in file.read()
