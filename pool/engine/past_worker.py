"""Play a past in a process of its own, so that who asked goes on with other work meanwhile: `python -m` this module.

Takes a pickle of (pieces, setting, since, until, stop) on its input, gives one of (Played, Measures) on its output, and
tells how far it is as lines `arrived all` on its error output. Both ends are this program; nothing else is read.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from typing import BinaryIO, TextIO

from pool.engine.past import Piece, Setting, play
from pool.engine.past_measures import measure

NICE = 10
"""Schedulers and pages come first on the machine."""


def main(given: BinaryIO, answer: BinaryIO, progress: TextIO) -> None:
    """Play what is given; ``stop`` None plays on until everything is done."""
    pieces: Sequence[Piece]
    setting: Setting
    pieces, setting, since, until, stop = pickle.load(given)

    def told(arrived: int, whole: int) -> None:
        progress.write(f"{arrived} {whole}\n")
        progress.flush()

    played = play(pieces, setting, stop, told=told)
    pickle.dump((played, measure(pieces, setting, played, since, until)), answer)
    answer.flush()


if __name__ == "__main__":
    os.nice(NICE)
    main(sys.stdin.buffer, sys.stdout.buffer, sys.stderr)
