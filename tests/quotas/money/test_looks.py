"""Tables of finance: order and columns are in the address, hold for all rows, and come back in this browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

import pytest
from django.test import Client
from django.urls import reverse

from portal.kernel.clock import set_clock
from quotas.web.money.look import COOKIE, LONGEST
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
NOON = at("2026-06-16 12:00")


@pytest.fixture
def lab() -> World:
    w = world()
    w.price("16", at("2026-05-01"))
    w.price("20", at("2026-06-01"))
    for n in range(60):
        start = at(f"2026-06-{1 + n % 12:02d} {n % 20:02d}:00")
        w.lease(start, start.replace(minute=1 + n % 59), department=(w.vision, w.search)[n % 3 == 0])
    w.lease(at("2026-06-16 09:00"))
    return w


@pytest.fixture
def fin(lab: World) -> Iterator[Client]:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    with set_clock(NOON):
        yield client


def test_the_ledger_is_ordered_over_all_pages_and_shows_the_columns_that_were_chosen(fin: Client) -> None:
    address = reverse("quotas:ledger")
    found = []
    for page in (1, 2):
        answer = fin.get(address, {"sort": "-cost", "page": page})
        found += [line.amount_micro for line in answer.context["page"]]
    assert len(found) == 60 and found == sorted(found, reverse=True)
    assert 'aria-sort="descending"' in answer.content.decode()
    for sort in ("entry", "time", "request", "department", "person", "place", "hours", "price"):
        assert fin.get(address, {"sort": sort}).status_code == 200
    text = fin.get(address, {"hide": "price,place", "sort": ""}).content.decode()
    table = text[text.index("<table") : text.index("</table>")]
    assert len(re.findall(r"<th scope=\"col\"", table)) == 7
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", table, flags=re.S)
    assert len(rows) == 51 and {row.count("<td ") for row in rows} == {6}
    for wrong in ({"sort": "colour"}, {"hide": "colour"}, {"hide": "entry"}):
        assert fin.get(address, wrong).status_code == 400
    for name in ("ledger-file", "month-file"):
        file = fin.get(reverse(f"quotas:{name}"), {"hide": "price", "for": "machines", "month": "2026-06"})
        assert "micro_per_gpu_hour" in file.content.decode().splitlines()[0], "files have every column"


def test_months_home_prices_and_budgets_are_ordered_and_totals_stay(fin: Client, lab: World) -> None:
    usual = fin.get(reverse("quotas:month"), {"month": "2026-06"}).context
    names = [group.label for group in usual["page"]]
    assert len(names) == 2
    for sort in ("group", "hours", "cost", "share", "lines", "before"):
        up = fin.get(reverse("quotas:month"), {"month": "2026-06", "sort": sort})
        down = fin.get(reverse("quotas:month"), {"month": "2026-06", "sort": f"-{sort}"})
        assert {g.label for g in up.context["page"]} == set(names)
        assert up.context["report"].total == down.context["report"].total == usual["report"].total
        if sort != "before":
            assert [g.label for g in up.context["page"]] == [g.label for g in down.context["page"]][::-1]
    people = fin.get(reverse("quotas:month"), {"month": "2026-06", "by": "user", "sort": "group"})
    assert [g.label for g in people.context["page"]] == ["Lin Yue"]
    home = fin.get(reverse("quotas:finance-home"), {"sort": "group", "hide": "share"})
    assert [g.label for g in home.context["groups"]] == ["Search", "Vision"]
    prices = fin.get(reverse("quotas:prices"), {"sort": "price"})
    assert [rate.micro_per_gpu_hour for rate in prices.context["rates"]] == [16_000_000, 20_000_000]
    assert fin.get(reverse("quotas:budgets"), {"sort": "-forecast", "hide": "warned"}).status_code == 200
    for name in ("month", "finance-home", "prices", "budgets"):
        assert fin.get(reverse(f"quotas:{name}"), {"sort": "colour"}).status_code == 400


def test_the_last_choice_is_remembered_for_each_table_until_it_is_put_back(fin: Client) -> None:
    ledger, month = reverse("quotas:ledger"), reverse("quotas:month")
    fin.get(ledger, {"sort": "-cost", "hide": "price,place"})
    fin.get(month, {"sort": "lines"})
    sent = fin.get(ledger, {"month": "2026-06"})
    assert (sent.status_code, sent["Location"]) == (
        302, f"{ledger}?month=2026-06&sort=-cost&hide=price%2Cplace",
    )  # fmt: skip
    page = fin.get(sent["Location"])
    assert page.status_code == 200 and page.context["hide"] == ("price", "place")
    assert fin.get(month)["Location"] == f"{month}?sort=lines"
    assert fin.get(month, {"sort": "-cost"}).status_code == 200, "what is asked for goes before what was"
    assert fin.get(month)["Location"] == f"{month}?sort=-cost"
    reset = page.context["columns"][-1]
    assert reset["reset"] and fin.get(ledger + reset["url"].replace("&amp;", "&")).status_code == 200
    assert fin.get(ledger).status_code == 200
    assert fin.get(month).status_code == 302
    assert fin.cookies[COOKIE]["httponly"] and fin.cookies[COOKIE]["samesite"] == "Lax"


@pytest.mark.parametrize(
    "kept", ["", "nonsense", "%7B", "%5B1%5D", '%7B"ledger":3%7D', '%7B"ledger":%7B"sort":"colour"%7D%7D']
)
def test_what_a_browser_makes_of_it_breaks_no_page(fin: Client, kept: str) -> None:
    fin.cookies[COOKIE] = kept
    answer = fin.get(reverse("quotas:ledger"), follow=True)
    assert answer.status_code == 200 and answer.context["hide"] == ()
    assert fin.get(reverse("quotas:ledger")).status_code == 200, "a column that is no more is forgotten"


def test_a_form_that_is_sent_forgets_nothing_and_the_last_tables_are_kept(fin: Client) -> None:
    prices = reverse("quotas:prices")
    old = {f"report-{n}": {"hide": "x" * 100} for n in range(40)}
    fin.cookies[COOKIE] = quote(json.dumps(old), safe="")
    fin.get(prices, {"sort": "-price"})
    kept = json.loads(unquote(fin.cookies[COOKIE].value))
    assert len(fin.cookies[COOKIE].value) <= LONGEST
    assert list(kept)[-2:] == ["report-39", "prices"] and "report-0" not in kept
    fin.post(prices, {"flavour": ""})
    assert fin.get(prices)["Location"] == f"{prices}?sort=-price"
