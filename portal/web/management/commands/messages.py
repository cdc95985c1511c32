"""Extract, compile and check the translations, one catalogue a room."""

from __future__ import annotations

import gettext
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.management.commands import makemessages
from django.test.utils import override_settings

ROOMS = ("portal", "quotas", "pool", "monitoring")
LANGUAGE = "zh_Hans"


def ignored(room: str) -> list[str]:
    """What does not belong to `room`: the other rooms' code and templates."""
    others = [r for r in ROOMS if r != room]
    patterns = ["tests/*", ".venv/*", "data/*", "static/*", "docs/*", "deploy/*", "locale/*", "build/*"]
    for other in others:
        patterns += [f"{other}/*", f"templates/{other}/*"]
    if room != "portal":
        for entry in sorted((settings.BASE_DIR / "templates").iterdir()):
            if entry.name != room:
                patterns.append(f"templates/{entry.name}" + ("/*" if entry.is_dir() else ""))
    return patterns


class Extract(makemessages.Command):
    """Django's extraction with all that is found put into one catalogue; on its own it would take the folder `locale`
    at the top for every file."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = str(target)

    def find_files(self, root: str) -> list[Any]:
        """The files of this room, each bound to its catalogue."""
        found = super().find_files(root)
        for each in found:
            each.locale_dir = self.target
        return found


def entries(path: Path) -> str:
    """A catalogue's text without what changes by itself: comments of places and the creation date."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = [
        line
        for line in text.splitlines()
        if not line.startswith(("#:", '"POT-Creation-Date', '"PO-Revision-Date', '"Last-Translator', "#~"))
    ]
    return "\n".join(kept)


def conflicts(catalogues: Iterable[tuple[str, Path]]) -> list[str]:
    """Messages that two rooms translate differently. Django merges the catalogues and the first room's wording would
    show everywhere; the remedy is one wording, or a gettext context where the meanings differ. Reads compiled files."""
    wordings: dict[Any, dict[str, str]] = {}
    for room, mo in catalogues:
        if not mo.exists():
            continue
        with mo.open("rb") as compiled:
            catalogue: dict[Any, str] = vars(gettext.GNUTranslations(compiled))["_catalog"]
        for key, text in catalogue.items():
            if key:
                wordings.setdefault(key, {})[room] = text
    out: list[str] = []
    for key, by_room in wordings.items():
        if len(set(by_room.values())) > 1:
            msgid = (key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
            words = ", ".join(f"{room} {text!r}" for room, text in by_room.items())
            out.append(f'two wordings: "{msgid}": {words}')
    return sorted(set(out))


class Command(BaseCommand):
    """`messages [--room R]` extracts and compiles; `--check` changes nothing and fails where work is left."""

    help = __doc__
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--room", choices=ROOMS, action="append")
        parser.add_argument("--check", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        if shutil.which("msgfmt") is None:
            raise CommandError("GNU gettext is not installed (msgfmt is missing)")
        os.chdir(settings.BASE_DIR)
        wrong: list[str] = []
        for room in options["room"] or ROOMS:
            wrong += self._check(room) if options["check"] else self._update(room)
        wrong += conflicts((room, self._catalogue(room).with_suffix(".mo")) for room in ROOMS)
        for line in wrong:
            self.stderr.write(line)
        if options["check"] and wrong:
            raise CommandError(f"{len(wrong)} messages need work; run manage.py messages and translate")

    @staticmethod
    def _catalogue(room: str) -> Path:
        return settings.BASE_DIR / "locale" / room / LANGUAGE / "LC_MESSAGES" / "django.po"

    def _extract(self, room: str, target: Path) -> None:
        (target / LANGUAGE / "LC_MESSAGES").mkdir(parents=True, exist_ok=True)
        with override_settings(LOCALE_PATHS=[target]):
            call_command(
                Extract(target),
                locale=[LANGUAGE],
                ignore_patterns=ignored(room),
                extensions=["html", "txt", "py"],
                no_obsolete=True,
                add_location="file",
                no_wrap=True,
                verbosity=0,
            )

    def _update(self, room: str) -> list[str]:
        folder = settings.BASE_DIR / "locale" / room
        self._extract(room, folder)
        po = self._catalogue(room)
        if not po.exists():
            return []
        subprocess.run(["msgfmt", "-o", str(po.with_suffix(".mo")), str(po)], check=True)
        left = self._left(room, po)
        self.stdout.write(f"{room}: {len(left)} left")
        return left

    def _check(self, room: str) -> list[str]:
        po = self._catalogue(room)
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / room
            copy = target / LANGUAGE / "LC_MESSAGES" / "django.po"
            copy.parent.mkdir(parents=True)
            if po.exists():
                shutil.copy(po, copy)
            self._extract(room, target)
            if not copy.exists():
                return []
            wrong = self._left(room, copy)
            if entries(copy) != entries(po):
                wrong.append(f"{room}: the catalogue does not match the code")
            compiled = copy.with_suffix(".mo")
            subprocess.run(["msgfmt", "-o", str(compiled), str(po)], check=True)
            mo = po.with_suffix(".mo")
            if not mo.exists() or mo.read_bytes() != compiled.read_bytes():
                wrong.append(f"{room}: the compiled catalogue is stale")
        return wrong

    @staticmethod
    def _left(room: str, po: Path) -> list[str]:
        """Untranslated and fuzzy entries, by GNU msgattrib."""
        out: list[str] = []
        for flag, word in (("--untranslated", "untranslated"), ("--only-fuzzy", "fuzzy")):
            done = subprocess.run(
                ["msgattrib", "--no-obsolete", "--no-wrap", flag, str(po)],
                check=True,
                capture_output=True,
                text=True,
            )
            found = re.findall(r'^msgid (".*(?:\n".*)*)', done.stdout, flags=re.MULTILINE)
            out += [f"{room}: {word}: {item[:120]}" for item in found if item != '""']
        return out
