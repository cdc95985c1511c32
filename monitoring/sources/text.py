"""The text format of Prometheus, read line by line: a bad line loses itself and no other. Pure.

Bounds: lines of 16 KiB, 64 labels, 400,000 series. What is past them is counted and left out, so that a flood of labels
costs bounded memory. A body that was cut in the middle (`complete` false) loses its last, unfinished line, whose value
may have been cut to another number.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from monitoring.sources.reading import Metric

LINE_LIMIT = 16 * 1024
LABEL_LIMIT = 64
SERIES_LIMIT = 400_000
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=\}))')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


def metrics(body: str, problems: Counter[str], *, complete: bool = True) -> Iterator[Metric]:
    """The series of a body; problems by code: bad_line, long_line, too_many_labels, too_many_series, cut."""
    if not complete:
        problems["cut"] += 1
        body = body[: body.rfind("\n") + 1]
    count = 0
    for line in body.split("\n"):
        line = line.strip()
        if not line or line[0] == "#":
            continue
        if len(line) > LINE_LIMIT:
            problems["long_line"] += 1
            continue
        found = _line(line, problems)
        if found is None:
            continue
        count += 1
        if count > SERIES_LIMIT:
            problems["too_many_series"] += 1
            return
        yield found


def _line(line: str, problems: Counter[str]) -> Metric | None:
    name = _NAME.match(line)
    if name is None:
        problems["bad_line"] += 1
        return None
    labels: dict[str, str] = {}
    at = name.end()
    if line[at : at + 1] == "{":
        at += 1
        while True:
            rest = line[at:].lstrip()
            if rest.startswith("}"):
                at = len(line) - len(rest) + 1
                break
            label = _LABEL.match(line, at)
            if label is None:
                problems["bad_line"] += 1
                return None
            if len(labels) >= LABEL_LIMIT:
                problems["too_many_labels"] += 1
                return None
            raw = label.group(2)
            labels[label.group(1)] = (
                _ESCAPE.sub(lambda m: _ESCAPED.get(m.group(1), m.group(0)), raw) if "\\" in raw else raw
            )
            at = label.end()
    words = line[at:].split()
    if not words:
        problems["bad_line"] += 1
        return None
    value = number(words[0]) if len(words) <= 2 else None
    if value is None:
        problems["bad_value"] += 1
    stamp = number(words[1]) if len(words) == 2 else None
    whole = stamp is not None and math.isfinite(stamp)
    return Metric(name.group(0), labels, value, int(stamp) if whole and stamp is not None else None)


def number(text: str) -> float | None:
    """A float of the format, NaN and infinities among them; None for other text."""
    try:
        return float(text)
    except ValueError:
        return None
