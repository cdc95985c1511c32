"""Run the engine's play of a past in a process of its own, and tell how far it is meanwhile."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from django.conf import settings

from pool.engine.past import Piece, Played, Setting
from pool.engine.past_measures import Measures

LONGEST_S = 3600
"""A play that takes longer is given up."""

LOOK_S = 2.0
MODULE = "pool.engine.past_worker"


class PlayFailed(Exception):
    """The play was given up: ``code`` is too_long, forgotten or play_failed."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def run_play(
    pieces: Sequence[Piece],
    setting: Setting,
    *,
    since: int,
    until: int,
    stop: int | None,
    told: Callable[[int], bool],
) -> tuple[Played, Measures]:
    """Play and measure. ``told(arrived)`` is called every few seconds; once it gives False the play ends."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answer:
        pickle.dump((tuple(pieces), setting, since, until, stop), given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=given,
            stdout=answer,
            stderr=subprocess.PIPE,
            cwd=Path(settings.BASE_DIR),
            text=True,
        )
        try:
            _wait(process, told)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise PlayFailed("play_failed")
        answer.seek(0)
        found: tuple[Played, Measures] = pickle.load(answer)
        return found


def _wait(process: subprocess.Popen[str], told: Callable[[int], bool]) -> None:
    progress = [0]
    assert process.stderr is not None
    reader = threading.Thread(target=_read, args=(process.stderr, progress), daemon=True)
    reader.start()
    waited = 0.0
    while True:
        try:
            process.wait(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            waited += LOOK_S
            if waited > LONGEST_S:
                raise PlayFailed("too_long") from None
            if not told(progress[0]):
                raise PlayFailed("forgotten") from None
            continue
        reader.join(timeout=5)
        return


def _read(lines: IO[str], progress: list[int]) -> None:
    for line in lines:
        head = line.split(" ", 1)[0]
        if head.isdecimal():
            progress[0] = int(head)
