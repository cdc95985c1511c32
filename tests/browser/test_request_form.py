"""The request form in Chromium: simple for the simple case, folded for the rest; series, timetables and windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from portal.accounts.models import User
from portal.kernel.clock import now
from quotas.models import CapacityRequest, GpuFlavour
from quotas.services.capacity import pool_names_write
from quotas.services.series import series_follow
from tests.browser.conftest import Complaints
from tests.pool import builders as pool
from tests.quotas import build

UNDER_THE_BAR = ("target-size",)
"""The bar at the foot of a phone covers whatever lies under it just then; it scrolls free."""
LOOKS = [
    {"lang": "en", "theme": "light", "width": 1440},
    {"lang": "zh-hans", "theme": "dark", "width": 390},
]


@pytest.fixture(autouse=True)
def newest_question_only(complaints: Complaints) -> None:
    """A question to the panel that a newer one replaces is aborted, and htmx says so."""
    complaints.allow += ["htmx:sendAbort", "htmx:afterRequest"]


@pytest.fixture
def house(server: Any) -> build.House:
    """Video with H800 and A100 nodes, a lead, a researcher and a few requests of hers."""
    made = build.House()
    made.vision.name, made.video.name = "Vision & Multimodal", "Video Generation"
    made.vision.save()
    made.video.save()
    a100 = build.flavour("a100", installed=None, name="A100 80GB", mig_capable=True, mig_table="a100-80")
    GpuFlavour.objects.filter(pk=a100.pk).update(compute_slices=7, memory_slices=8)
    build.limits(made.video, a100, 8, hard_cap=16)
    build.price(a100, 10)
    for number in range(2):
        pool.node(made.h800, name=f"sh-h800-0{number}", rack="r1", switch="s1", row="A")
    pool.node(a100, name="sh-a100-00")
    pool_names_write(kind="dataset", rows={"laion-5b": {"name": "LAION"}, "tokens-v3": {"name": "Tokens"}})
    return made


def fill(page: Page, **values: str) -> None:
    """Type into fields by name."""
    for name, value in values.items():
        page.fill(f"[name={name}]", value)


@pytest.mark.parametrize("look", LOOKS, ids=["wide", "phone"])
def test_the_simple_case_shows_little(
    house: build.House, visit: Callable[..., Page], axe: Any, shot: Any, look: dict[str, Any]
) -> None:
    page = visit("/requests/new/", user=house.lin, **look)
    expect(page.locator("#fit .fit__line").first).to_be_visible()
    for hidden in (
        "array_count",
        "fabric",
        "deadline_at",
        "checkpoint_signal",
        "week_from",
        "timetable",
        "site_code",
    ):
        expect(page.locator(f"[name={hidden}]").first).to_be_hidden()
    expect(page.locator("[name=gpus_per_node]")).to_be_visible()
    expect(page.locator("#fit")).to_contain_text({"en": "now", "zh-hans": "现在"}[look["lang"]])
    axe(page, ignore=UNDER_THE_BAR)
    shot(page, f"form-{look['width']}")


@pytest.mark.parametrize("look", LOOKS, ids=["wide", "phone"])
def test_everything_unfolded(
    house: build.House, visit: Callable[..., Page], axe: Any, shot: Any, look: dict[str, Any]
) -> None:
    page = visit("/requests/new/", user=house.lin, **look)
    for summary in page.locator("details.more > summary").all():
        summary.click()
    page.select_option("[name=start]", "weekly")
    expect(page.locator("[name=week_from]")).to_be_visible()
    expect(page.locator("[name=hours]")).to_be_hidden()
    axe(page, ignore=UNDER_THE_BAR)
    shot(page, f"form-weekly-{look['width']}")
    page.select_option("[name=start]", "asap")
    page.check("[name=is_service]")
    page.check("[name=scale_by][value=timetable]", force=True)
    expect(page.locator("table.week td").first).to_be_visible()
    axe(page, ignore=UNDER_THE_BAR)
    shot(page, f"form-service-{look['width']}")


def test_a_timetable_is_painted_by_keyboard_and_pointer(
    house: build.House, visit: Callable[..., Page]
) -> None:
    page = visit("/requests/new/", user=house.lin)
    page.check("[name=is_service]")
    page.check("[name=scale_by][value=timetable]", force=True)
    first = page.locator("table.week tbody tr").nth(0).locator("td").nth(0)
    first.focus()
    page.keyboard.press("7")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("3")
    page.get_by_label("Paint with").fill("5")
    page.locator("table.week tbody tr").nth(6).locator("td").nth(23).click()
    days = json.loads(page.locator("[name=timetable]").input_value())
    assert (days[0][0], days[1][0], days[6][23], days[2][0]) == (7, 3, 5, 1)
    assert page.locator("[name=replicas]").input_value() == "7"
    page.get_by_role("button", name="Copy Monday to Tue – Fri").click()
    days = json.loads(page.locator("[name=timetable]").input_value())
    assert [day[0] for day in days] == [7, 7, 7, 7, 7, 1, 1]


def test_no_gpu_asks_neither_for_a_flavour_nor_a_price(
    house: build.House, visit: Callable[..., Page], settings: Any
) -> None:
    settings.GPUPOOL_DEMO = True
    page = visit("/requests/new/", user=house.lin)
    page.check("[name=shape][value=cpu]", force=True)
    for hidden in ("flavour", "gpus_per_node", "cuda_min"):
        expect(page.locator(f"[name={hidden}]")).to_be_hidden()
    expect(page.locator("[name=ask_by]").first.locator("..")).to_be_hidden()
    expect(page.locator("[name=nodes]")).to_be_visible()
    expect(page.locator("#fit")).to_contain_text("Needs no GPU.")
    expect(page.locator("#fit")).not_to_contain_text("¥")


def test_an_array_is_asked_and_its_members_are_on_its_page(
    house: build.House, visit: Callable[..., Page], axe: Any, shot: Any
) -> None:
    page = visit("/requests/new/", user=house.lin)
    fill(page, purpose="A sweep over seeds", command="python sweep.py --index $GPUPOOL_ARRAY_INDEX")
    page.get_by_text("Several at once, order, deadline").click()
    fill(page, array_count="5", array_at_once="2")
    expect(page.locator("#fit")).to_contain_text("5 members, 2 at once")
    page.get_by_role("button", name="Submit request").click()
    expect(page.get_by_role("heading", name="Members")).to_be_visible()
    head = CapacityRequest.objects.get(series="array")
    assert (head.array_count, head.array_at_once, head.members.count()) == (5, 2, 5)
    axe(page)
    shot(page, "array")
    page.get_by_role("button", name="Withdraw", exact=True).first.click()
    expect(page.get_by_text("withdrawn", exact=False).first).to_be_visible()
    assert head.members.filter(state="withdrawn").count() == 1


def test_a_wish_that_no_node_meets_is_told_beside_its_field(
    house: build.House, visit: Callable[..., Page], complaints: Complaints
) -> None:
    complaints.allow.append("400 (Bad Request)")
    page = visit("/requests/new/", user=house.lin)
    fill(page, purpose="x", command="true")
    page.get_by_text("Site, network, racks, data sets").click()
    fill(page, datasets="no-such-set")
    page.get_by_role("button", name="Submit request").click()
    expect(page.locator("#id_datasets-error")).to_contain_text("There is no such data set")
    expect(page.locator("[name=datasets]")).to_have_value("no-such-set")
    expect(page.locator("[name=datasets]")).to_be_visible()
    assert CapacityRequest.objects.count() == 0


@pytest.mark.parametrize("look", LOOKS, ids=["wide", "phone"])
def test_pages_of_a_window_and_of_a_service(
    house: build.House, visit: Callable[..., Page], axe: Any, shot: Any, look: dict[str, Any]
) -> None:
    today, year = now().date(), timedelta(days=200)
    window = house.submit(
        duration_s="",
        window={
            "days": [0, 1, 2, 3, 4], "from": "09:00", "to": "17:00", "zone": "Asia/Shanghai",
            "first": today.isoformat(), "until": (today + year).isoformat(),
        },
    )  # fmt: skip
    office = [[3 if 9 <= hour < 18 else 1 for hour in range(24)]] * 5 + [[1] * 24] * 2
    service = house.submit(
        is_service=True, duration_s="", review_at=(now() + year).isoformat(), scale_by="timetable",
        timetable={"zone": "Asia/Shanghai", "days": office}, work_class="inference",
        health={"kind": "http", "port": 8080, "path": "/healthz"},
    )  # fmt: skip
    CapacityRequest.objects.filter(pk=service.pk).update(
        state="series", decided_at=now(), queued_at=now(), replicas_wanted=None
    )
    series_follow(head_id=service.pk)
    for name, row in (("window", window), ("service", service)):
        page = visit(f"/requests/{row.uid}/", user=User.objects.get(pk=house.lin.pk), **look)
        axe(page)
        shot(page, f"{name}-{look['width']}")
