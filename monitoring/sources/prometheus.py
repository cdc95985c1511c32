"""Answers of a Prometheus server's query API as series. Pure.

The server stores floats: DCGM's blanks come back rounded and are known by their size (pitfall P17). Labels that the
scrape renamed (`exported_…`) are the exporter's own and come first; the plain ones may be the target's.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator

from monitoring.sources.dcgm import NAMES, XID, XID_COUNT
from monitoring.sources.reading import Metric
from monitoring.sources.text import LABEL_LIMIT, SERIES_LIMIT, number

DEFAULT_QUERY = (
    '{__name__=~"' + "|".join(sorted(n for n in NAMES if n[0] == "D") + [XID, XID_COUNT]) + '"}'
    ' or {__name__=~"nvidia_smi_('
    + "utilization_gpu_ratio|memory_.*_bytes|temperature_.*|power_draw_.*|gpu_info"
    '|clocks_current_.*|clocks_.*_reasons_active|mig_mode_current|compute_app.*)"}'
)


class BadAnswer(ValueError):
    """No answer of such a server: `code` is bad_json, query_refused or bad_shape."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def metrics(body: bytes, problems: Counter[str]) -> Iterator[Metric]:
    """The series of an instant query; raises `BadAnswer` before the first where the answer is none."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("bad_json") from error
    if not isinstance(answer, dict) or answer.get("status") != "success":
        raise BadAnswer("query_refused" if isinstance(answer, dict) and "error" in answer else "bad_shape")
    data = answer.get("data")
    if (
        not isinstance(data, dict)
        or data.get("resultType") != "vector"
        or not isinstance(data.get("result"), list)
    ):
        raise BadAnswer("bad_shape")
    if len(data["result"]) > SERIES_LIMIT:
        problems["too_many_series"] += len(data["result"]) - SERIES_LIMIT
    return _series(data["result"][:SERIES_LIMIT], problems)


def _series(rows: list[object], problems: Counter[str]) -> Iterator[Metric]:
    for row in rows:
        labels = row.get("metric") if isinstance(row, dict) else None
        value = row.get("value") if isinstance(row, dict) else None
        if not isinstance(labels, dict) or not isinstance(value, list) or len(value) != 2:
            problems["bad_line"] += 1
            continue
        if len(labels) > LABEL_LIMIT:
            problems["too_many_labels"] += 1
            continue
        at, text = value
        good_time = isinstance(at, int | float) and not isinstance(at, bool) and math.isfinite(at)
        if not good_time or not isinstance(labels.get("__name__"), str):
            problems["bad_line"] += 1
            continue
        clean = {
            str(name): text for name, text in labels.items() if isinstance(text, str) and name != "__name__"
        }
        yield Metric(labels["__name__"], clean, number(str(text)), round(at * 1000))
