"""October in Berlin, with every kind of event, to be checked with a pencil; and all forms that say the same of it.

An H800 hour costs 10.00, from 15 October 12.00. An A100 has no price until finance sets 5.00 on the 29th, as of the
28th.

| when                                              | who    | GPU·h     | money                     |
|---------------------------------------------------|--------|-----------|---------------------------|
| 3 Oct 08:00–20:00, a whole H800                   | Vision | 12        | 120.00                    |
| 5 Oct 06:00–18:00, half of one                    | Vision | 6         | 60.00                     |
| 14 Oct 12:00 – 15 Oct 12:00, the price changes    | Search | 12 + 12   | 120.00 + 144.00           |
| 19 Oct 18:00 – 20 Oct 06:00, Vision is renamed    | Vision | 6 + 6     | 72.00 + 72.00             |
| 21 Oct 00:00–04:00, preempted, again 08:00–12:00  | Search | 4 + 4     | 48.00 + 48.00             |
| 22 Oct 00:00, its node is lost at 18:00; known on | Vision | 24 − 6    | 288.00 − 72.00            |
| the 23rd, when the 22nd is booked already         |        |           |                           |
| 24 Oct 10:00, a clock says it ended at 09:58      | Search | 0         | 0                         |
| 25 Oct, the day of 25 hours                       | Vision | 25        | 300.00                    |
| 28 Oct 00:00–10:00, an A100 without a price       | Search | 10        | 0 + 50.00 (set late)      |
| 31 Oct 20:00 – 1 Nov 04:00, over the month's end  | Search | 4 (+ 4)   | 48.00 (+ 48.00 in November) |
| finance takes 2 hours off the 3rd of October      | Vision | −2        | −20.00                    |
| October is closed; then 12.00 come off the 15th   | Search | 0         | (−12.00 in November)      |

October: Vision 71 h, 820.00; Search 46 h, 458.00; together 117 h, 1,278.00. November: Search 4 h, 36.00.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import openpyxl
import pypdf
import pytest
from django.db.models import Sum
from django.test import Client
from django.urls import reverse

from monitoring.models import ExportJob
from monitoring.services.exports import export_make, path_of
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from quotas.engine.focus import problems
from quotas.models import GpuFlavour, LedgerEntry
from quotas.services.ledger import ledger_accrue
from quotas.services.months import correction_book, month_close
from quotas.services.prices import rate_set
from tests.quotas.money.build import World, named, person, world

pytestmark = pytest.mark.django_db
BERLIN = ZoneInfo("Europe/Berlin")
H = 3_600_000
OCTOBER = {"Vision": (71, 820), "Search": (46, 458)}


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).astimezone(UTC)


@pytest.fixture
def books(settings: Any) -> Iterator[Client]:
    """The month as told above, and finance looking at it on 3 November."""
    settings.GPUPOOL_BILLING_TIME_ZONE = "Europe/Berlin"
    tell(world())
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    with set_clock(at("2026-11-03T09:00")):
        yield client


def booked(day: date, **more: Any) -> LedgerEntry:
    return LedgerEntry.objects.get(local_day=day, kind="usage", **more)


def tell(w: World) -> None:
    named(w.vision, "Lab / Vision", at("2026-01-01T00:00"), at("2026-10-20T00:00"))
    named(w.vision, "Lab / Vision Group", at("2026-10-20T00:00"))
    w.price("10", at("2026-10-01T00:00"))
    w.price("12", at("2026-10-15T00:00"))
    a100 = GpuFlavour.objects.create(code="A100-80GB", name="A100 80GB", memory_mib=81920)
    w.lease(at("2026-10-03T08:00"), at("2026-10-03T20:00"))
    w.lease(at("2026-10-05T06:00"), at("2026-10-05T18:00"), charge=500)
    w.lease(at("2026-10-14T12:00"), at("2026-10-15T12:00"), department=w.search)
    w.lease(at("2026-10-19T18:00"), at("2026-10-20T06:00"))
    w.lease(at("2026-10-21T00:00"), at("2026-10-21T04:00"), department=w.search)
    w.lease(at("2026-10-21T08:00"), at("2026-10-21T12:00"), department=w.search)
    lost = w.lease(at("2026-10-22T00:00"))
    with set_clock(at("2026-10-23T00:20")):
        assert ledger_accrue() == 1
    with set_clock(at("2026-10-23T09:00")):
        w.close(lost, at("2026-10-22T18:00"))
    skewed = w.lease(at("2026-10-24T10:00"), department=w.search)
    assert w.close(skewed, at("2026-10-24T09:58")).ended_at == at("2026-10-24T10:00")
    w.lease(at("2026-10-25T00:00"), at("2026-10-26T00:00"))
    w.lease(at("2026-10-28T00:00"), at("2026-10-28T10:00"), department=w.search, flavour=a100)
    with set_clock(at("2026-10-29T10:00")):
        rate_set(
            acting_user=SYSTEM, flavour=a100, micro_per_gpu_hour=5_000_000, valid_from=at("2026-10-28T00:00")
        )
    w.lease(at("2026-10-31T20:00"), at("2026-11-01T04:00"), department=w.search)
    with set_clock(at("2026-11-02T10:00")):
        ledger_accrue()
        take(booked(date(2026, 10, 3)), 2, 20)
        month_close(acting_user=SYSTEM, month=date(2026, 10, 1))
        take(booked(date(2026, 10, 15)), 0, 12)


def take(line: LedgerEntry, hours: int, money: int) -> None:
    correction_book(
        acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=-hours * H, amount_micro=-money * 1_000_000, reason="checked"
    )  # fmt: skip


def test_every_line_is_the_one_of_the_table(books: Client) -> None:
    lines = LedgerEntry.objects.order_by("starts_at", "id").values_list(
        "local_day", "department_path", "gpu_ms", "amount_micro", "reason", "booked_month"
    )
    october, november = date(2026, 10, 1), date(2026, 11, 1)
    vision, group, search = "Lab / Vision", "Lab / Vision Group", "Lab / Search"
    wanted = [
        (3, vision, 12, 120, "", october),
        (3, vision, -2, -20, "checked", october),
        (5, vision, 6, 60, "", october),
        (14, search, 12, 120, "", october),
        (15, search, 12, 144, "", october),
        (15, search, 0, -12, "checked", november),
        (19, vision, 6, 72, "", october),
        (20, group, 6, 72, "", october),
        (21, search, 4, 48, "", october),
        (21, search, 4, 48, "", october),
        (22, group, 24, 288, "", october),
        (22, group, -6, -72, "ended_earlier", october),
        (25, group, 25, 300, "", october),
        (28, search, 10, 0, "", october),
        (28, search, 0, 50, "priced_late", october),
        (31, search, 4, 48, "", october),
        (32, search, 4, 48, "", november),
    ]
    assert [
        ((day - october).days + 1, path, ms / H, micro / 1_000_000, reason, month)
        for day, path, ms, micro, reason, month in lines
    ] == wanted
    sums = LedgerEntry.objects.values_list("booked_month").annotate(h=Sum("gpu_ms"), m=Sum("amount_micro"))
    assert sorted(sums) == [(october, 117 * H, 1_278_000_000), (november, 4 * H, 36_000_000)]


def groups(rows: list[dict[str, Any]], name: str, hours: str, money: str) -> dict[str, tuple[int, int]]:
    """GPU-milliseconds and micro units of rows by the last word of a department."""
    out: dict[str, list[int]] = {}
    for row in rows:
        key = str(row[name]).rpartition(" / ")[2].replace("Vision Group", "Vision")
        sums = out.setdefault(key, [0, 0])
        sums[0] += int(row[hours])
        sums[1] += int(Decimal(str(row[money])))
    return {key: (h, m) for key, (h, m) in out.items()}


def test_screen_files_api_and_focus_say_the_same(books: Client) -> None:
    exact = {name: (h * H, m * 1_000_000) for name, (h, m) in OCTOBER.items()}
    month = {"month": "2026-10"}
    # on screen
    page = books.get(reverse("quotas:month"), month)
    assert {g.label: (g.total.gpu_ms, g.total.amount_micro) for g in page.context["report"].groups} == exact
    assert 'title="1,278.00">¥1,278.00' in page.content.decode() and ">117.0<" in page.content.decode()
    ledger = books.get(reverse("quotas:ledger"), month).context
    assert (ledger["all_ms"], ledger["all_micro"]) == (117 * H, 1_278_000_000)
    report = books.get(reverse("monitoring:report", args=["chargeback"]), {"period": "2026-10"})
    assert 'title="1,278.00">¥1,278.00' in report.content.decode()
    # lines as files
    machines = list(csv.DictReader(io.StringIO(text(books, "month-file", **{"for": "machines"}))))
    assert groups(machines, "department", "gpu_ms", "amount_micro") == exact
    people = rows_below(text(books, "month-file", **{"for": "people"}), "Entry")
    assert sum(Decimal(row["Cost"]) for row in people) == 1278
    assert sum(int(row["GPU-milliseconds"]) for row in people) == 117 * H
    table = rows_below(text(books, "month-file", **{"for": "people", "rows": "groups"}), "Group")
    assert [(row["Group"], row["GPU·h"], row["Cost"]) for row in table] == [
        ("Vision", "71.000000", "820.000000"),
        ("Search", "46.000000", "458.000000"),
        ("Total", "117.000000", "1278.000000"),
    ]
    # the report as files
    address = reverse("monitoring:report-file", args=["chargeback"])
    files = {
        form: books.get(address, {"period": "2026-10", "format": form}).content
        for form in ("machines", "people", "xlsx", "pdf")
    }
    rows = list(csv.DictReader(io.StringIO(files["machines"].decode())))
    assert groups(rows, "group", "hours_gpu_ms", "charge_micro") == exact
    assert {row["group"]: int(row["corrections_micro"]) for row in rows} == {
        "Vision": -92_000_000, "Search": 50_000_000,
    }  # fmt: skip
    last = rows_below(files["people"].decode("utf-8-sig"), "Department")[-1]
    assert (last["GPU-hours"], last["To be charged"]) == ("117.000000", "1278.000000")
    sheet = openpyxl.load_workbook(io.BytesIO(files["xlsx"]), data_only=True).worksheets[1]
    heads = [cell.value for cell in sheet[1]]
    cells = [
        dict(zip(heads, [cell.value for cell in row], strict=True)) for row in sheet.iter_rows(min_row=2)
    ]
    assert [(row["GPU-hours"], row["To be charged"]) for row in cells] == [(71, 820), (46, 458), (117, 1278)]
    formulas = openpyxl.load_workbook(io.BytesIO(files["xlsx"])).worksheets[1]
    bottom = dict(zip(heads, [cell.value for cell in formulas[formulas.max_row]], strict=True))
    added = {
        head: value for head, value in bottom.items() if isinstance(value, str) and value.startswith("=")
    }
    assert {"GPU-hours", "GPU-hours (GPU-milliseconds)", "To be charged", "Lines"} <= set(added)
    printed = " ".join(
        " ".join(one.extract_text() for one in pypdf.PdfReader(io.BytesIO(files["pdf"])).pages).split()
    )
    for words in ("Vision 71.0", "Search 46.0", "Total 117.0", "¥820.00", "¥458.00", "¥1,278.00"):
        assert words in printed
    # the API
    api = books.get("/api/v1/months/2026-10/").json()
    assert {g["label"]: (g["gpu_ms"], g["amount_micro"]) for g in api["groups"]} == exact
    assert api["total"] == {"gpu_ms": 117 * H, "amount_micro": 1_278_000_000, "lines": 15}
    answer = books.get("/api/v1/reports/chargeback/?period=2026-10").json()["tables"][0]
    total = dict(zip(answer["columns"], answer["total"], strict=True))
    assert (total["hours_gpu_ms"], total["charge_micro"]) == (117 * H, 1_278_000_000)
    lines = books.get("/api/v1/ledger/?month=2026-10&page_size=200").json()["results"]
    assert groups(lines, "department", "gpu_ms", "amount_micro") == exact


def test_focus_has_the_same_month_and_names_what_came_after_the_close(
    books: Client, settings: Any, tmp_path: Any
) -> None:
    settings.GPUPOOL_DATA_DIR = tmp_path
    found = {}
    for month in ("2026-10", "2026-11"):
        asked = books.post(
            "/api/v1/exports/", {"file": "focus", "month": month}, content_type="application/json"
        )
        job = ExportJob.objects.get(uid=asked.json()["uid"])
        assert export_make(job_id=job.pk)
        rows = list(csv.DictReader(io.StringIO(path_of(job).read_text())))
        assert problems(rows[0], rows) == []
        found[month] = rows
    october = [{**row, "micro": Decimal(row["BilledCost"]) * 1_000_000} for row in found["2026-10"]]
    assert groups(october, "SubAccountName", "x_GpuMilliseconds", "micro") == {
        name: (h * H, m * 1_000_000) for name, (h, m) in OCTOBER.items()
    }
    late = [row for row in found["2026-11"] if row["ChargeClass"] == "Correction"]
    assert [(row["BilledCost"], row["ChargePeriodStart"]) for row in late] == [
        ("-12.000000", "2026-10-14T22:00:00Z")
    ]
    assert sum(Decimal(row["BilledCost"]) for row in found["2026-11"]) == 36
    day = next(row for row in found["2026-10"] if row["x_GpuMilliseconds"] == str(25 * H))
    length = datetime.fromisoformat(day["ChargePeriodEnd"]) - datetime.fromisoformat(day["ChargePeriodStart"])
    assert length == timedelta(hours=25)


def text(client: Client, name: str, **query: str) -> str:
    return client.get(reverse(f"quotas:{name}"), {"month": "2026-10", **query}).content.decode("utf-8-sig")


def rows_below(file: str, first: str) -> list[dict[str, str]]:
    """The table of a file for people, below its head block."""
    lines = file.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{first},"))
    return list(csv.DictReader(lines[start:]))
