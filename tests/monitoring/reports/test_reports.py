"""The hand-computed month (see story.py): every figure, on the page, in files and in the API, by hand."""

from __future__ import annotations

import csv
import io
from datetime import date, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import openpyxl
import pypdf
import pytest
from django.db.models import Sum
from django.test import Client, override_settings
from django.urls import reverse

from monitoring.models import CardDay, CardSpan, ReportRun, UseDay
from monitoring.selectors.reports.base import Answer, ask_from, day_axis
from monitoring.selectors.reports.frozen import period_text
from monitoring.selectors.reports.kinds import KINDS
from monitoring.services.card_states import card_states_sweep
from monitoring.services.day_sums import day_sum, days_sum
from monitoring.web.report_figures import shown
from pool.models import Cluster, Gpu, Node, Site
from portal.accounts.models import Department
from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.kernel.tables import MACHINE_UNITS, TEXT
from portal.ops.actor import SYSTEM
from quotas.models import LedgerEntry
from quotas.services.months import correction_book
from tests.monitoring.reports.story import H, Story, tell
from tests.quotas.money.build import at, person, world

pytestmark = pytest.mark.django_db
NOW = at("2026-06-03T09:00")


@pytest.fixture
def story() -> Story:
    return tell()


def answer(kind: str, reader: object, **params: str) -> Answer:
    with set_clock(NOW):
        found = KINDS[kind]
        return found.make(ask_from(found, {"period": "2026-05", **params}, policy_of(reader)))


def test_the_months_hours_by_hand(story: Story) -> None:
    sums = CardDay.objects.filter(local_day__range=(date(2026, 5, 1), date(2026, 5, 31))).aggregate(
        *(Sum(f"{name}_ms") for name in ("installed", "down", "maintenance", "allocated", "stranded"))
    )
    assert sums == {
        "installed_ms__sum": 2 * 31 * 24 * H,
        "down_ms__sum": 24 * H,
        "maintenance_ms__sum": 2 * 12 * H,
        "allocated_ms__sum": (60 + 6 + 2) * H,
        "stranded_ms__sum": 0,
    }
    fin = person("fin", ("finance", None))
    found = answer("utilization", fin)
    rows = {row[0]: row[1:] for row in found.tables[0].rows}
    # allocated, effective, idle, idle share, unknown, cost, idle cost, before
    assert rows["Vision"] == [66 * H, 48 * H, 18 * H, 2727, 30 * H, 672_000_000, 180_000_000, 0]
    assert rows["Search"] == [2 * H, 2 * H, 0, 0, 2 * H, 24_000_000, 0, 0]
    assert found.tables[0].total()[1] == 68 * H
    assert [part.value for part in found.parts] == [
        50 * H,
        18 * H,
        (1488 - 68 - 24 - 24) * H,
        0,
        24 * H,
        24 * H,
    ]
    assert found.whole == 1488 * H
    assert found.covered == (36 * H, 68 * H)


def test_days_sum_to_months_and_departments_to_the_pool(story: Story) -> None:
    fin = person("fin", ("finance", None))
    whole = answer("utilization", fin).tables[0].total()
    for by in ("flavour", "user", "site", "cost_code", "path", "node", "lease"):
        assert answer("utilization", fin, by=by).tables[0].total()[1:8] == whole[1:8]
    days = [
        answer("utilization", fin, period="days", **{"from": day, "to": day}).tables[0].total()
        for day in (f"2026-05-{n:02d}" for n in range(1, 32))
    ]
    for place in (1, 2, 3, 5, 6, 7):
        assert sum(day[place] for day in days) == whole[place]
    vision, search = (
        answer("utilization", person(f"lead-{d.code}", ("lead", d))).tables[0].total()
        for d in (story.w.vision, story.w.search)
    )
    for place in (1, 2, 3, 5, 6, 7):
        assert vision[place] + search[place] == whole[place]
    assert (
        whole[6]
        == LedgerEntry.objects.filter(local_day__lt=date(2026, 6, 1)).aggregate(m=Sum("amount_micro"))["m"]
    )


def test_P056_page_csv_xlsx_pdf_and_api_have_the_same_totals(story: Story) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    with set_clock(NOW):
        query = "?period=2026-05"
        page = client.get(reverse("monitoring:report", args=["utilization"]) + query)
        base = reverse("monitoring:report-file", args=["utilization"]) + query
        files = {form: client.get(f"{base}&format={form}") for form in ("people", "machines", "xlsx", "pdf")}
        api = client.get(f"/api/v1/reports/utilization/{query}").json()
    text = page.content.decode()
    assert page.status_code == 200
    assert 'title="68.000">68.0' in text
    assert 'title="696.00">¥696.00' in text
    table = api["tables"][0]
    total = dict(zip(table["columns"], table["total"], strict=True))
    assert (total["allocated_gpu_ms"], total["cost_micro"], total["idle_cost_micro"]) == (
        68 * H,
        696_000_000,
        180_000_000,
    )
    rows = list(csv.DictReader(io.StringIO(files["machines"].content.decode())))
    assert sum(int(row["allocated_gpu_ms"]) for row in rows) == 68 * H
    assert sum(int(row["cost_micro"]) for row in rows) == 696_000_000
    people = files["people"].content.decode("utf-8-sig").splitlines()
    last = dict(zip(next(csv.reader([people[-4]])), next(csv.reader([people[-1]])), strict=True))
    assert (last["Allocated"], last["Allocated (GPU-milliseconds)"], last["Cost"]) == (
        "68.000000", str(68 * H), "696.000000",
    )  # fmt: skip
    for formulas in (False, True):
        book = openpyxl.load_workbook(io.BytesIO(files["xlsx"].content), data_only=not formulas)
        sheet = book["Utilization"]
        heads = [cell.value for cell in sheet[1]]
        bottom = dict(zip(heads, [cell.value for cell in sheet[sheet.max_row]], strict=True))
        if formulas:
            assert bottom["Cost"] == "=ROUND(SUM(K2:K3),6)"
            assert bottom["Allocated (GPU-milliseconds)"] == "=SUM(C2:C3)"
        else:
            assert (bottom["Allocated"], bottom["Allocated (GPU-milliseconds)"], bottom["Cost"]) == (
                68,
                68 * H,
                696,
            )
        assert sheet.freeze_panes == "B2"
    about = {row[0].value: row[1].value for row in book["About"].iter_rows(min_row=1, max_row=10)}
    assert about["Billing time zone"] == "Asia/Shanghai"
    printed = words_of(files["pdf"].content)
    kinds = [
        next((k for k, unit in MACHINE_UNITS.items() if key.endswith(f"_{unit}")), TEXT)
        for key in table["columns"]
    ]
    bottom = [
        None if value is None else shown(value, kind)
        for value, kind in zip(table["total"], kinds, strict=True)
    ]
    lines = [[shown(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in table["rows"]]
    for cells in (*lines, ["Total", *(cell for cell in bottom[1:] if cell is not None)]):
        assert " ".join(" ".join(cells).split()) in printed


def words_of(pdf: bytes) -> str:
    """The text of a PDF file as a reader of it gets it, one space between words."""
    return " ".join(" ".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(pdf)).pages).split())


def test_a_printed_report_in_chinese_can_be_read_as_text(story: Story) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "zh-hans"
    with set_clock(NOW):
        file = client.get(
            reverse("monitoring:report-file", args=["chargeback"]) + "?period=2026-05&format=pdf"
        )
    printed = words_of(file.content).replace(" ", "")
    assert "合计" in printed and "696.00" in printed
    assert "\ufffd" not in printed


def test_a_kept_run_gives_the_same_bytes_after_the_books_went_on(story: Story) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    with set_clock(NOW):
        client.post(reverse("monitoring:report-keep", args=["chargeback"]), {"period": "2026-05"})
    run = ReportRun.objects.get()
    address = reverse("monitoring:report-run-file", args=[run.uid])
    forms = ("people", "machines", "xlsx", "pdf")
    with set_clock(NOW):
        first = {form: client.get(f"{address}?format={form}").content for form in forms}
    story.w.vision.name = "Renamed"
    story.w.vision.save()
    with set_clock(NOW + timedelta(days=40)):
        line = LedgerEntry.objects.order_by("id").first()
        correction_book(acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=0, amount_micro=-1_000_000, reason="x")
        later = {form: client.get(f"{address}?format={form}").content for form in forms}
        now_rows = answer("chargeback", person("fin2", ("finance", None))).tables[0].total()
    assert later == first
    assert b"Vision" in first["machines"] and b"Renamed" not in later["machines"]
    assert now_rows[4] == 695_000_000
    assert run.content["tables"][0]["rows"][0][4] == 672_000_000


def test_chargeback_tells_corrections_apart_in_the_books_they_stand_in(story: Story) -> None:
    with set_clock(NOW):
        line = LedgerEntry.objects.order_by("id").first()
        correction_book(
            acting_user=SYSTEM,
            entry_uid=line.uid,
            gpu_ms=-H,
            amount_micro=-10_000_000,
            reason="card was broken",
        )
    fin = person("fin", ("finance", None))
    rows = {row[0]: row[1:] for row in answer("chargeback", fin).tables[0].rows}
    assert rows["Vision"][:4] == [65 * H, 672_000_000, -10_000_000, 662_000_000]
    # the day's sums follow the ledger: cost with the correction, hours as held
    with set_clock(NOW + timedelta(minutes=10)):
        days_sum(limit=100)
    total = answer("utilization", fin).tables[0].total()
    assert (total[1], total[6]) == (68 * H, 686_000_000)


def test_chargeback_is_compared_with_the_same_days_of_the_months_before(story: Story) -> None:
    """While June runs only May's first days stand beside it, of the last of them as much as has passed of today; once
    it is over the whole of May, 696.00."""
    found = []
    for day in ("2026-06-03T09:00", "2026-06-12T09:00", "2026-07-03T09:00"):
        with set_clock(at(day)):
            kind, fin = KINDS["chargeback"], person(f"f{day}", ("finance", None))
            asked = kind.make(ask_from(kind, {"period": "2026-06"}, policy_of(fin)))
        assert asked.before is not None
        found.append((asked.before.first, asked.before.last, asked.before.part, asked.stats[0].before))
    may = date(2026, 5, 1)
    assert found == [
        (may, date(2026, 5, 3), (540, 1440), 0),
        (may, date(2026, 5, 12), (540, 1440), 480_000_000 + 45_000_000),
        (may, date(2026, 5, 31), None, 696_000_000),
    ]


def test_what_still_lasts_is_compared_with_the_same_part_of_the_time_before() -> None:
    """A card that is held without end since 1 April, looked at on 12 May at 06:00 and at 18:30: nothing changed."""
    w = world()
    w.price("10", at("2026-03-01T00:00"))
    w.lease(at("2026-04-01T00:00"))
    fin = policy_of(person("fin", ("finance", None)))
    asks = [
        {"period": "2026-05"},
        {"period": "last7"},
        {"period": "days", "from": "2026-05-12", "to": "2026-05-12"},
        {"period": "days", "from": "2026-05-10", "to": "2026-05-20"},
    ]
    for moment, hours in (("2026-05-12T06:00", 6), ("2026-05-12T18:30", 18.5)):
        with set_clock(at(moment)):
            days_sum(limit=100)
            for params in asks:
                for code in ("utilization", "waste"):
                    found = KINDS[code].make(ask_from(KINDS[code], params, fin))
                    changes = {stat.change for stat in found.stats if stat.before}
                    assert changes <= {0.0}, (moment, params, code, found.stats)
                used = KINDS["utilization"].make(ask_from(KINDS["utilization"], params, fin))
                assert used.stats[0].before == used.stats[0].value, params
                assert used.tables[0].total()[-1] == used.stats[0].value
            one_day = KINDS["utilization"].make(ask_from(KINDS["utilization"], asks[2], fin))
            assert (one_day.stats[0].value, one_day.stats[3].value) == (hours * H, hours * 10_000_000)
            assert one_day.before is not None
            assert period_text(one_day.before) == f"2026-05-11 – 2026-05-11 {moment[-5:]}"
    with set_clock(at("2026-06-02T00:00")):
        whole = ask_from(KINDS["utilization"], {"period": "2026-05"}, fin).period.before()
    assert (whole.first, whole.last, whole.part) == (date(2026, 4, 1), date(2026, 4, 30), None)
    with set_clock(at("2026-03-31T12:00")):
        short = ask_from(KINDS["utilization"], {}, fin).period.before()
    assert (short.first, short.last, short.part) == (date(2026, 2, 1), date(2026, 2, 28), (720, 1440))


def test_waits_of_today_are_compared_with_those_up_to_the_same_time_yesterday(story: Story) -> None:
    fin = policy_of(person("fin", ("finance", None)))
    with set_clock(at("2026-05-20T09:00")):
        today = {"period": "days", "from": "2026-05-20", "to": "2026-05-20"}
        found = KINDS["waits"].make(ask_from(KINDS["waits"], today, fin))
    assert found.before is not None and found.before.end == at("2026-05-19T09:00")


def test_each_day_of_a_report_opens_the_lines_of_the_ledger(story: Story) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    address = reverse("monitoring:report", args=["utilization"])
    with set_clock(NOW):
        chart = client.get(f"{address}?period=2026-05&by=flavour&site=sh").context["answer"].chart
    to = dict(zip(chart["links"]["x"], chart["links"]["to"], strict=True))
    assert (len(to), to["05-12"]) == (31, f"{reverse('quotas:ledger')}?site=sh&day=2026-05-12")
    with set_clock(NOW):
        assert client.get(to["05-12"]).context["all_ms"] == 12 * H
        wrong = client.get(f"{reverse('quotas:ledger')}?day=2026-05-32")
    assert wrong.status_code == 400


def test_days_of_two_years_have_names_of_their_own_in_a_chart() -> None:
    assert day_axis([date(2026, 2, 28), date(2026, 3, 1)]) == ["02-28", "03-01"]
    assert day_axis([date(2025, 12, 31), date(2026, 1, 1)]) == ["2025-12-31", "2026-01-01"]


def test_readers_see_their_departments_and_nothing_else(story: Story) -> None:
    lead = person("lead", ("lead", story.w.search))
    found = answer("utilization", lead)
    assert [row[0] for row in found.tables[0].rows] == ["Search"]
    assert found.parts == [] and len(found.tables) == 1
    alien = person("alien", ("researcher", story.w.search))
    assert answer("utilization", alien).tables[0].rows == []
    assert [row[1] for row in answer("utilization", story.w.user).tables[0].rows] == [66 * H, 2 * H]
    client = Client()
    client.force_login(lead)
    with set_clock(NOW):
        assert client.get(reverse("monitoring:report", args=["inventory"])).status_code == 403
        address = reverse("monitoring:report", args=["utilization"])
        assert client.get(f"{address}?department={story.w.vision.uid}").status_code == 404
        assert client.get(f"{address}?colour=red").status_code == 400
        assert client.get(f"{address}?period=2026-13").status_code == 400
        assert client.get(f"{address}?period=days&from=2026-05-02&to=2026-05-01").status_code == 400
        client.post(reverse("monitoring:report-keep", args=["utilization"]), {"period": "2026-05"})
    run = ReportRun.objects.get()
    assert run.departments == [story.w.search.pk]
    for other, status in (
        (alien, 404),
        (person("v", ("lead", story.w.vision)), 404),
        (person("a", ("auditor", None)), 200),
    ):
        client.force_login(other)
        assert client.get(reverse("monitoring:report-run", args=[run.uid])).status_code == status


def test_a_year_of_a_department_with_nothing_says_so(story: Story) -> None:
    """29 February 2024 to 28 February 2025, of the pool and of a department that never held anything."""
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    empty = Department.objects.create(code="empty", name="Empty", parent=story.w.root)
    year = {"period": "days", "from": "2024-02-29", "to": "2025-02-28"}
    with set_clock(NOW):
        for code in KINDS:
            for more in ({}, {"department": str(empty.uid)}):
                page = client.get(reverse("monitoring:report", args=[code]), {**year, **more})
                assert page.status_code == 200
                main = page.context["main"]
                assert [value for row in main.rows for value in row[1:] if value] == []
                if not main.rows:
                    assert "Nothing in this period under this filter" in page.content.decode()
                for form in ("people", "machines", "xlsx", "pdf"):
                    file = client.get(
                        reverse("monitoring:report-file", args=[code]), {**year, **more, "format": form}
                    )
                    assert file.status_code == 200 and file.content, (code, form)
        month = client.get(reverse("quotas:month"), {"month": "2024-02", "department": str(empty.uid)})
        assert month.context["report"].total.lines == 0 and len(month.context["report"].days) == 29
    assert UseDay.objects.filter(local_day__lt=date(2026, 5, 1)).count() == 0


def test_summing_a_day_again_changes_nothing_and_a_gone_card_stops_counting(story: Story) -> None:
    before = list(
        UseDay.objects.order_by("local_day", "span").values_list(
            "local_day", "span", "idle_ms", "amount_micro"
        )
    )
    story.second.condition = "retired"
    story.second.condition_since = at("2026-06-02T12:00")
    story.second.save()
    with set_clock(NOW):
        assert card_states_sweep() == 1
        assert days_sum(limit=100) == 3
    after = list(
        UseDay.objects.order_by("local_day", "span").values_list(
            "local_day", "span", "idle_ms", "amount_micro"
        )
    )
    assert after == before
    assert CardDay.objects.get(local_day=date(2026, 6, 2), gpu=story.second).installed_ms == 12 * H
    assert not CardDay.objects.filter(local_day=date(2026, 6, 3), gpu=story.second).exists()


def test_decimals_of_files_are_exact() -> None:
    from portal.kernel import tables

    assert tables.plain(1, tables.MONEY) == Decimal("0.000001")
    assert tables.plain(-3_600_000, tables.HOURS) == Decimal("-1.000000")
    assert tables.share(1, 3) == 3333
    assert tables.share(2, 3) == 6667
    assert tables.share(1, 0) is None


@override_settings(GPUPOOL_BILLING_TIME_ZONE="Europe/Berlin")
def test_P048_days_of_23_and_25_hours_are_counted_as_they_are() -> None:
    w = world()
    berlin = ZoneInfo("Europe/Berlin")
    cluster = Cluster.objects.create(code="c1", name="c1", site=Site.objects.create(code="be", name="Berlin"))
    node = Node.objects.create(name="n1", cluster=cluster, health="ok")
    card = Gpu.objects.create(
        uuid="GPU-1", node=node, flavour=w.flavour, index=0, model_name="X", memory_mib=1
    )
    for first, hours in ((date(2026, 3, 29), 23), (date(2026, 10, 25), 25), (date(2024, 2, 29), 24)):
        Gpu.objects.update(created_at=at(f"{first - timedelta(days=1)}T00:00", berlin))
        CardSpan.objects.all().delete()
        with set_clock(at(f"{first + timedelta(days=1)}T12:00", berlin)):
            card_states_sweep()
            day_sum(day=first)
        assert CardDay.objects.get(local_day=first, gpu=card).installed_ms == hours * H
