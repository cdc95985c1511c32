"""Finance on three years of books: pages from the kept sums, drill-down, large files, the nightly comparison.

`GPUPOOL_PERF_PARTS` (default: all) takes some of pages, xlsx, focus, pdf, nightly, after the same fill.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.perf._database import fresh_database

LEASES = int(os.environ.get("GPUPOOL_PERF_LEASES", 1_000_000))
BIG_LINES = int(os.environ.get("GPUPOOL_PERF_LINES", 1_000_000))
PARTS = os.environ.get("GPUPOOL_PERF_PARTS", "pages xlsx focus pdf nightly").split()
ROUNDS = 12


def run() -> dict[str, Any]:
    """Seconds and memory of each."""
    with fresh_database():
        from tests.perf._three_years import build

        began = time.monotonic()
        books = build(LEASES, BIG_LINES)
        figures: dict[str, float] = {"fill_s": round(time.monotonic() - began, 1)}
        for part in ("pages", "xlsx", "focus", "pdf", "nightly"):
            if part in PARTS:
                print(f"{time.monotonic() - began:.0f} s: {part}", file=sys.stderr, flush=True)
                figures |= MAKERS[part](books)
        aims = {
            "month_first_ms": ["<", 5000],
            "month_p95_ms": ["<", 500],
            "utilization_p95_ms": ["<", 500],
            "chargeback_p95_ms": ["<", 500],
            "drill_down_p95_ms": ["<", 300],
            "drill_people_p95_ms": ["<", 300],
            "ledger_p95_ms": ["<", 300],
            "big_month_p95_ms": ["<", 500],
            "big_people_p95_ms": ["<", 500],
            "xlsx_s": ["<", 20],
            "xlsx_mib": ["<", 300],
            "pdf_s": ["<", 20],
            "pdf_pages": [">=", 40],
            "focus_s": ["<", 60],
            "focus_mib": ["<", 300],
            "reconcile_s": ["<", 60],
            "differences": ["<", 1],
        }
        aims = {name: aim for name, aim in aims.items() if name in figures}
        return {"sizes": books.sizes, "figures": figures, "aims": aims}


def _pages(books: Any) -> dict[str, float]:
    from django.test import Client
    from django.urls import reverse

    month, big = f"{books.ordinary:%Y-%m}", f"{books.big:%Y-%m}"
    pages = reverse("quotas:month")
    utilization = reverse("monitoring:report", args=["utilization"])
    chargeback = reverse("monitoring:report", args=["chargeback"])
    addresses = {
        "month": f"{pages}?month={month}",
        "utilization": f"{utilization}?period={month}",
        "chargeback": f"{chargeback}?period={month}",
        "drill_down": f"{pages}?month={month}&department={books.division.uid}",
        "drill_people": f"{pages}?month={month}&department={books.division.uid}&by=user",
        "ledger": f"{reverse('quotas:ledger')}?month={month}&department={books.division.uid}",
        "big_month": f"{pages}?month={big}",
        "big_people": f"{pages}?month={big}&by=user",
    }
    gc.collect()
    gc.freeze()
    client = Client()
    client.force_login(books.finance)
    client.cookies["django_language"] = "en"
    out: dict[str, float] = {}
    for name, address in addresses.items():
        began = time.perf_counter()
        answer = client.get(address)
        first = (time.perf_counter() - began) * 1000
        if answer.status_code != 200:
            raise RuntimeError(f"{name}: {answer.status_code}")
        times = []
        for _round in range(ROUNDS):
            began = time.perf_counter()
            client.get(address)
            times.append((time.perf_counter() - began) * 1000)
        times.sort()
        out |= {
            f"{name}_first_ms": round(first, 1),
            f"{name}_median_ms": round(statistics.median(times), 1),
            f"{name}_p95_ms": round(times[max(0, round(0.95 * len(times)) - 1)], 1),
        }
    return out


def _child(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.perf._file_run", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:] + done.stdout[-500:])
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _export(books: Any, name: str, kind: str, params: dict[str, str]) -> dict[str, float]:
    """One large file, as a worker makes it."""
    from monitoring.models import ExportJob
    from monitoring.services.exports import export_ask, path_of
    from portal.ops.actor import Actor

    job = export_ask(acting_user=Actor(user=books.finance), kind=kind, params=params)
    found = _child("export", str(job.pk))
    job = ExportJob.objects.get(pk=job.pk)
    return {
        f"{name}_s": found["seconds"],
        f"{name}_mib": found["memory_mib"],
        f"{name}_rows": job.total,
        f"{name}_mb": round(path_of(job).stat().st_size / 1e6, 1),
    }


def _xlsx(books: Any) -> dict[str, float]:
    return _export(books, "xlsx", "lines_xlsx", {"month": f"{books.big:%Y-%m}", "site": "site0"})


def _focus(books: Any) -> dict[str, float]:
    return _export(books, "focus", "focus", {"month": f"{books.big:%Y-%m}"})


def _pdf(books: Any) -> dict[str, float]:
    """The people who used one flavour in a month fill some forty pages."""
    from quotas.models import GpuFlavour

    flavour = GpuFlavour.objects.earliest("pk").code
    found = _child("pdf", "chargeback", "user", f"{books.ordinary:%Y-%m}", flavour)
    return {"pdf_s": found["seconds"], "pdf_mib": found["memory_mib"], "pdf_pages": found["pages"]}


def _nightly(_books: Any) -> dict[str, float]:
    from quotas.services.reconcile import reconcile

    began = time.monotonic()
    found = reconcile()
    return {"reconcile_s": round(time.monotonic() - began, 1), "differences": found.differences}


MAKERS = {"pages": _pages, "xlsx": _xlsx, "focus": _focus, "pdf": _pdf, "nightly": _nightly}
