"""The price book: departments' own prices, list prices, import of a file, one currency."""

from __future__ import annotations

import io
from datetime import date

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import IntegrityError, transaction
from django.test import Client, override_settings
from django.urls import reverse

from portal.accounts.policy import DepartmentTree, policy_of
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import SYSTEM, Actor
from quotas.engine.focus import problems
from quotas.models import LedgerEntry, PoolName, PriceRate
from quotas.selectors.focus import COLUMNS, focus_rows
from quotas.selectors.money import Lines, line_filter
from quotas.selectors.price_preview import price_preview
from quotas.selectors.prices import PriceBook, rates_now
from quotas.selectors.running import running_now
from quotas.services.months import correction_book
from quotas.services.price_import import prices_import
from quotas.services.prices import rate_set
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
START = at("2026-01-01T00:00")


@pytest.fixture
def w() -> World:
    """10.00 for all; Vision pays 8.00 (list 10.00) from 5 May, at site bj 7.00."""
    made = world()
    made.price("10", START)
    with set_clock(START):
        for micro, site, listed in ((8_000_000, "", 10_000_000), (7_000_000, "bj", None)):
            rate_set(
                acting_user=SYSTEM, flavour=made.flavour, micro_per_gpu_hour=micro, site_code=site,
                department=made.vision, list_micro_per_gpu_hour=listed, valid_from=at("2026-05-05T00:00"),
            )  # fmt: skip
    return made


def booked(**lookup: object) -> list[tuple[int, int]]:
    found = LedgerEntry.objects.filter(**lookup).order_by("starts_at")
    return list(found.values_list("micro_per_gpu_hour", "amount_micro"))


def test_a_departments_own_price_cuts_its_lines_and_nobody_elses(w: World) -> None:
    w.lease(at("2026-05-04T22:00"), at("2026-05-05T02:00"))
    w.lease(at("2026-05-04T22:00"), at("2026-05-05T02:00"), department=w.search)
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"), site="bj")
    assert booked(department_id_ref=w.vision.pk) == [
        (10_000_000, 20_000_000), (8_000_000, 16_000_000), (7_000_000, 7_000_000),
    ]  # fmt: skip
    assert booked(department_id_ref=w.search.pk) == [(10_000_000, 20_000_000)] * 2


def test_the_running_part_has_the_same_price(w: World) -> None:
    w.lease(at("2026-05-06T00:00"), None)
    w.lease(at("2026-05-06T00:00"), None, department=w.search)
    with set_clock(at("2026-05-06T03:00")):
        found = {row.department_id: row.cut.amount_micro for row in running_now().cuts}
    assert found == {w.vision.pk: 24_000_000, w.search.pk: 30_000_000}


def test_the_nearest_department_wins_and_gaps_fall_back(w: World) -> None:
    with set_clock(START):
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=9_000_000, department=w.root,
            valid_from=at("2026-05-01T00:00"),
        )  # fmt: skip
    book = PriceBook.load()
    assert [s.micro_per_gpu_hour for s in book.spans(w.flavour.pk, "", w.vision.pk)] == [
        10_000_000, 9_000_000, 8_000_000,
    ]  # fmt: skip
    assert [s.micro_per_gpu_hour for s in book.spans(w.flavour.pk, "bj", w.vision.pk)][-1] == 7_000_000
    assert [s.micro_per_gpu_hour for s in book.spans(w.flavour.pk, "", w.search.pk)] == [
        10_000_000,
        9_000_000,
    ]
    assert [s.micro_per_gpu_hour for s in book.spans(w.flavour.pk)] == [10_000_000]
    may = {"at": at("2026-05-10T00:00"), "site_code": ""}
    assert rates_now([w.flavour.pk], department_id=w.vision.pk, **may) == {w.flavour.pk: 8_000_000}
    assert rates_now([w.flavour.pk], department_id=w.search.pk, **may) == {w.flavour.pk: 9_000_000}
    assert rates_now(None, department_id=None, **may) == {w.flavour.pk: 10_000_000}


def test_the_database_refuses_two_prices_at_a_time(w: World) -> None:
    for department in (None, w.vision):
        with pytest.raises(IntegrityError), transaction.atomic():
            PriceRate.objects.create(
                flavour=w.flavour, department=department, micro_per_gpu_hour=1,
                during=(at("2026-06-01T00:00"), None),
            )  # fmt: skip
    for field in ("micro_per_gpu_hour", "list_micro_per_gpu_hour"):
        with pytest.raises(IntegrityError), transaction.atomic():
            PriceRate.objects.filter(department=w.vision).update(**{field: -1})
    assert PriceRate.objects.count() == 3


def test_a_past_price_is_refused_only_where_its_own_lines_are_booked(w: World) -> None:
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"))
    with set_clock(at("2026-05-08T00:00")):
        with pytest.raises(Conflict):
            rate_set(
                acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=1, department=w.root,
                valid_from=at("2026-05-06T00:00"),
            )  # fmt: skip
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=1, department=w.search,
            valid_from=at("2026-05-06T00:00"),
        )  # fmt: skip
    assert PriceRate.objects.filter(department=w.root).count() == 0


def test_focus_has_the_list_price_beside_what_is_charged(w: World) -> None:
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"))
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"), department=w.search)
    policy = policy_of(person("fin", ("finance", None)))
    with set_clock(at("2026-06-02T00:00")):
        lines = Lines(policy, line_filter({"month": "2026-05"}, policy))
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in focus_rows(lines)]
    assert problems(COLUMNS, rows) == []
    kept = (
        "ListCost",
        "ListUnitPrice",
        "ContractedCost",
        "ContractedUnitPrice",
        "EffectiveCost",
        "BilledCost",
    )
    assert [[row[name] for name in kept] for row in rows] == [
        ["10.000000", "10.000000", "8.000000", "8.000000", "8.000000", "8.000000"], ["10.000000"] * 6,
    ]  # fmt: skip


def test_the_preview_of_a_departments_price_takes_its_lines_alone(w: World) -> None:
    w.lease(at("2026-04-06T00:00"), at("2026-04-06T02:00"))
    w.lease(at("2026-04-06T00:00"), at("2026-04-06T01:00"), department=w.search)
    asked = {"flavour": w.flavour, "site": "", "month": date(2026, 4, 1), "tree": DepartmentTree.load()}
    own = price_preview(micro_per_gpu_hour=5_000_000, department_id=w.search.pk, **asked)
    assert [(row.was, row.would) for row in own.rows] == [(10_000_000, 5_000_000)]
    general = price_preview(micro_per_gpu_hour=5_000_000, **asked)
    assert [(row.name, row.would) for row in general.rows] == [
        ("Lab / Search", 5_000_000)
    ]  # Vision has its own


FILE = """flavour,site,department,price,list_price,valid_from,book
H800-80GB,,,12.5,,2026-07-01 00:00,2026-07
h800 80gb,bj,search,11,12.5,2026-07-01T00:00:00+08:00,2026-07
"""


def test_a_file_is_taken_as_a_whole_and_the_own_export_changes_nothing(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    with set_clock(at("2026-05-20T00:00")):
        seen = prices_import(acting_user=fin, file=FILE.encode(), reason="plan", dry_run=True)
        assert [row.new for row in seen] == [True, True] and PriceRate.objects.count() == 3
        prices_import(acting_user=fin, file=("﻿" + FILE).encode("utf-8"), reason="plan")
        assert PriceRate.objects.count() == 5
        made = PriceRate.objects.get(department=w.search)
        assert (made.site_code, made.micro_per_gpu_hour, made.list_micro_per_gpu_hour, made.book) == (
            "bj", 11_000_000, 12_500_000, "2026-07",
        )  # fmt: skip
        assert made.during.lower == at("2026-07-01T00:00")
        client = Client()
        client.force_login(fin.user)
        export = client.get(reverse("quotas:prices-file"), {"for": "machines"}).content
        again = prices_import(acting_user=fin, file=export)
        assert [row.new for row in again] == [False] * 5 and PriceRate.objects.count() == 5


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("flavour,price\nH999,1\n", "2/flavour"),
        ("flavour,price\nH800-80GB,-1\n", "2/price"),
        ("flavour,price\nH800-80GB,dear\n", "2/price"),
        ("flavour,price\nH800-80GB,2000000\n", "2/price"),
        ("flavour,price,micro_per_gpu_hour\nH800-80GB,1,1000000\n", "2/price"),
        ("flavour,price,department\nH800-80GB,1,nobody\n", "2/department"),
        ("flavour,price,valid_from\nH800-80GB,1,soon\n", "2/valid_from"),
        ("flavour,price,valid_from\nH800-80GB,1,2026-07-01\nH800-80GB,2,2026-07-01\n", "2/valid_from"),
        ("flavour,price,colour\nH800-80GB,1,red\n", "0/colour"),
        ("price\n1\n", "0/flavour"),
    ],
)
def test_a_file_with_an_error_changes_nothing_and_names_it(w: World, text: str, pointer: str) -> None:
    good = "flavour,price,valid_from\nH800-80GB,3,2026-08-01\n"
    fin = Actor(user=person("fin", ("finance", None)))
    with set_clock(at("2026-05-20T00:00")), pytest.raises(Invalid) as error:
        prices_import(acting_user=fin, file=text.encode())
    assert error.value.errors[0]["pointer"] == pointer
    assert PriceRate.objects.count() == 3
    with (
        set_clock(at("2026-05-20T00:00")),
        pytest.raises(Invalid),
    ):  # a good row before it is not taken either
        prices_import(acting_user=fin, file=(good + "H999,1,2026-09-01\n").encode())
    assert PriceRate.objects.count() == 3


def test_who_may_import_on_the_page_and_over_the_api(w: World) -> None:
    auditor = person("aud", ("auditor", None))
    with pytest.raises(Refused):
        prices_import(acting_user=Actor(user=auditor), file=FILE.encode())
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    address = reverse("quotas:prices")
    with set_clock(at("2026-05-20T00:00")):
        wrong = client.post(
            address, {"import": "take", "file": SimpleUploadedFile("p.csv", b"flavour,price\nX,1\n")}
        )
        assert wrong.status_code == 400 and "There is no such flavour." in wrong.content.decode()
        check = client.post(address, {"import": "check", "file": SimpleUploadedFile("p.csv", FILE.encode())})
        assert check.status_code == 200 and "2 of 2 rows would set a price" in check.content.decode()
        assert PriceRate.objects.count() == 3
        dry = client.post("/api/v1/prices/import/", {"file": io.BytesIO(FILE.encode())})
        assert dry.status_code == 200 and [row["new"] for row in dry.json()["results"]] == [True, True]
        sent = client.post("/api/v1/prices/import/", {"file": io.BytesIO(FILE.encode()), "dry_run": "false"})
        assert sent.status_code == 200 and PriceRate.objects.count() == 5
        listed = client.get("/api/v1/prices/").json()["results"]
        assert [row["department"] for row in listed] == ["", "", "vision", "vision", "search"]
        taken = client.post(address, {"import": "take", "file": SimpleUploadedFile("p.csv", FILE.encode())})
        assert taken.status_code == 302 and PriceRate.objects.count() == 5
        own = {
            "flavour": w.flavour.pk,
            "price": "6",
            "department": "search",
            "list_price": "9",
            "reason": "deal",
        }
        assert client.post(address, own).status_code == 302
    made = PriceRate.objects.latest("pk")
    assert (made.department, made.micro_per_gpu_hour, made.list_micro) == (w.search, 6_000_000, 9_000_000)
    client.force_login(auditor)
    assert client.post("/api/v1/prices/import/", {"file": io.BytesIO(FILE.encode())}).status_code == 403


def test_another_currency_is_refused_before_anything_is_shown(w: World) -> None:
    with override_settings(GPUPOOL_CURRENCY="USD"):
        call_command("check", databases=["default"])  # nothing is booked yet
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"))
    call_command("check", databases=["default"])
    with override_settings(GPUPOOL_CURRENCY="USD"), pytest.raises(SystemCheckError, match="kept in CNY"):
        call_command("check", databases=["default"])


def test_a_price_of_a_site_that_is_not_there_is_refused(w: World) -> None:
    PoolName.objects.create(kind=PoolName.Kind.SITE, code="bj", name="Beijing", active=True)
    before = PriceRate.objects.count()
    with pytest.raises(Invalid) as error:
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=99_000_000, site_code="nope",
            valid_from=at("2026-06-01T00:00"),
        )  # fmt: skip
    assert error.value.errors == [{"pointer": "site", "detail": "There is no such site. Known: bj."}]
    with pytest.raises(Invalid):
        prices_import(acting_user=SYSTEM, file=b"flavour,site,price\nA100,nope,99\n")
    assert PriceRate.objects.count() == before


def test_a_correction_of_absurd_size_is_refused(w: World) -> None:
    w.lease(at("2026-05-06T00:00"), at("2026-05-06T01:00"))
    line = LedgerEntry.objects.get()
    for gpu_ms, amount_micro in ((0, 10**18), (0, 2**63), (2**63, 0), (0, 10**13 + 1)):
        with pytest.raises(Invalid):
            correction_book(
                acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=gpu_ms, amount_micro=amount_micro, reason="x"
            )
    assert LedgerEntry.objects.count() == 1
    correction_book(acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=0, amount_micro=10**13, reason="x")
    assert LedgerEntry.objects.count() == 2
