"""Each main page on a year of data: median and p95 of the time in this process, bytes, queries.

200 departments, 2,000 people, 20,000 allocations (`_year`). The time is that of the whole middleware and
template chain by Django's test client, without a network. The cold load is one page with its styles, scripts
and icons, compressed as the server sends them.
"""

from __future__ import annotations

import gc
import gzip
import re
import statistics
import time
from pathlib import Path
from typing import Any

from tests.perf._database import fresh_database

ROUNDS = 21
STATIC = Path(__file__).resolve().parents[2] / "static"


def run() -> dict[str, Any]:
    """Figures of every page and the worst of each kind."""
    with fresh_database():
        from tests.perf._year import build

        began = time.monotonic()
        year = build()
        filled = time.monotonic() - began
        return _measure(year, filled)


def _pages(year: Any) -> list[tuple[str, Any, str]]:
    """(name, who opens it, address)."""
    from django.urls import reverse

    def at(name: str, *args: Any) -> str:
        return reverse(name, args=args)

    rows: list[tuple[str, Any, str]] = [
        ("home", year.researcher, at("quotas:home")),
        ("request_new", year.researcher, at("quotas:request-new")),
        ("requests", year.researcher, at("quotas:request-list")),
        ("request", year.researcher, at("quotas:request-detail", year.request.uid)),
        ("leases", year.researcher, at("pool:leases")),
        ("leases_all", year.admin, at("pool:leases")),
        ("allocation", year.researcher, at("pool:allocation", year.allocation.uid)),
        ("approvals", year.lead, at("quotas:approvals")),
        ("quotas_lead", year.lead, at("quotas:quota-tree")),
        ("quotas_all", year.admin, at("quotas:quota-tree")),
        ("wall", year.admin, at("monitoring:wall")),
        ("gpu", year.admin, at("monitoring:gpu", year.gpu.uid)),
        ("nodes", year.admin, at("pool:nodes")),
        ("node", year.admin, at("pool:node", year.node.uid)),
        ("operations", year.admin, at("pool:operations")),
        ("finance", year.finance, at("quotas:finance-home")),
        ("month", year.finance, at("quotas:month")),
        ("month_users", year.finance, at("quotas:month") + "?by=user"),
        ("ledger", year.finance, at("quotas:ledger")),
        ("prices", year.finance, at("quotas:prices")),
        ("budgets", year.finance, at("quotas:budgets")),
        ("report", year.finance, at("monitoring:report", "utilization")),
        ("chargeback", year.finance, at("monitoring:report", "chargeback")),
        ("waits", year.finance, at("monitoring:report", "waits")),
        ("people", year.admin, at("accounts:people")),
        ("departments", year.admin, at("accounts:departments")),
        ("audit", year.admin, at("ops:audit")),
        ("incidents", year.admin, at("ops:incidents")),
        ("notices", year.researcher, at("notify:list")),
    ]
    if year.step is not None:
        rows.append(("approval", year.lead, at("quotas:approval-detail", year.step.uid)))
    return rows


def _measure(year: Any, filled: float) -> dict[str, Any]:
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    gc.collect()
    gc.freeze()  # as the process does that web servers are forked from: what is loaded is not looked through again
    from monitoring.services.card_states import card_states_sweep
    from monitoring.services.day_sums import days_sum

    card_states_sweep()
    began = time.monotonic()
    days = days_sum(limit=400)
    figures: dict[str, float] = {
        "fill_s": round(filled, 1),
        "day_sum_ms": round(1000 * (time.monotonic() - began) / max(1, days), 1),
    }
    worst = {"p95_ms": 0.0, "queries": 0, "html_kb": 0.0}
    cold = ""
    for name, user, address in _pages(year):
        client = Client()
        client.force_login(user)
        client.cookies["django_language"] = "en"
        answer = client.get(address)
        if answer.status_code != 200:
            figures[f"{name}_status"] = answer.status_code
            continue
        times = []
        for _round in range(ROUNDS):
            start = time.perf_counter()
            answer = client.get(address)
            times.append((time.perf_counter() - start) * 1000)
        with CaptureQueriesContext(connection) as queries:
            client.get(address)
        times.sort()
        p95 = times[max(0, round(0.95 * len(times)) - 1)]
        figures |= {
            f"{name}_median_ms": round(statistics.median(times), 1),
            f"{name}_p95_ms": round(p95, 1),
            f"{name}_bytes": len(answer.content),
            f"{name}_queries": len(queries),
        }
        worst["p95_ms"] = max(worst["p95_ms"], round(p95, 1))
        worst["queries"] = max(worst["queries"], len(queries))
        worst["html_kb"] = max(worst["html_kb"], round(len(answer.content) / 1000, 1))
        if name == "leases":
            cold = answer.content.decode()
    figures |= {f"worst_{key}": value for key, value in worst.items()}
    figures["cold_load_kb"] = _cold(cold)
    aims = {
        "worst_p95_ms": ["<", 150],
        "worst_queries": ["<", 16],
        "worst_html_kb": ["<", 60],
        "cold_load_kb": ["<", 200],
    }
    return {"sizes": year.sizes, "figures": figures, "aims": aims}


def _cold(html: str) -> float:
    """Kilobytes of a page with what it links and what its modules import, compressed."""
    size = len(gzip.compress(html.encode()))
    todo = set(re.findall(r'(?:href|src)="[^"]*static/(?:~[0-9a-f]+/)?([^"?#]+)"', html))
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        path = STATIC / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        content = path.read_bytes()
        size += len(gzip.compress(content))
        if path.suffix == ".mjs":
            inside = re.findall(rb"""from ['"]\./([\w./-]+)['"]""", content)
            todo |= {str(Path(name).parent / part.decode()) for part in inside}
    return round(size / 1000, 1)
