"""Catalogues of the rooms agree with each other: Django merges them into one."""

import subprocess
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from portal.web.management.commands import messages

HEAD = (
    'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: nplurals=1; plural=0;\\n"\n\n'
)


def compiled(folder: Path, room: str, body: str) -> tuple[str, Path]:
    """A room's compiled catalogue holding `body`."""
    po = folder / f"{room}.po"
    po.write_text(HEAD + body, encoding="utf-8")
    subprocess.run(["msgfmt", "-o", str(po.with_suffix(".mo")), str(po)], check=True)
    return room, po.with_suffix(".mo")


def test_two_wordings_of_one_message_are_found(tmp_path: Path) -> None:
    rooms = [
        compiled(tmp_path, "quotas", 'msgid "By"\nmsgstr "操作人"\n\nmsgid "Open"\nmsgstr "打开"\n'),
        compiled(tmp_path, "pool", 'msgid "By"\nmsgstr "延长"\n\nmsgid "Open"\nmsgstr "打开"\n'),
    ]
    assert messages.conflicts(rooms) == ["two wordings: \"By\": quotas '操作人', pool '延长'"]


def test_a_context_parts_two_meanings(tmp_path: Path) -> None:
    rooms = [
        compiled(tmp_path, "quotas", 'msgid "By"\nmsgstr "操作人"\n'),
        compiled(tmp_path, "pool", 'msgctxt "extend"\nmsgid "By"\nmsgstr "延长"\n'),
        ("monitoring", tmp_path / "none.mo"),
    ]
    assert messages.conflicts(rooms) == []


def test_plurals_are_compared_too(tmp_path: Path) -> None:
    one = 'msgid "%(n)s node"\nmsgid_plural "%(n)s nodes"\nmsgstr[0] "%(n)s 个节点"\n'
    rooms = [compiled(tmp_path, "quotas", one), compiled(tmp_path, "pool", one.replace(" 个节点", " 节点"))]
    assert len(messages.conflicts(rooms)) == 1


def test_the_check_fails_on_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages.Command, "_check", lambda self, room: [])
    monkeypatch.setattr(messages, "conflicts", lambda catalogues: ['two wordings: "By"'])
    with pytest.raises(CommandError):
        call_command("messages", "--check")


def test_shipped_catalogues_agree() -> None:
    root = settings.BASE_DIR / "locale"
    rooms = [(r, root / r / messages.LANGUAGE / "LC_MESSAGES" / "django.mo") for r in messages.ROOMS]
    assert messages.conflicts(rooms) == []
