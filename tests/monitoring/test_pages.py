"""Pages, fragments, API and metrics: exact figures, N/A with its reason, and who may see what."""

from __future__ import annotations

import gzip
import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from monitoring.selectors.board import board_forget
from monitoring.services import ingest, intake
from monitoring.services.rollups import rollup_run
from portal.accounts.models import Role
from portal.kernel.clock import now, set_clock
from tests.monitoring import builders as b

pytestmark = pytest.mark.django_db


@pytest.fixture
def scene() -> dict[str, Any]:
    vision, other = b.department("vision"), b.department("other")
    node = b.node("sh-h800-09", 3)
    cards = list(node.gpus.all())
    people = {
        "holder": b.person("wu.tao", where=vision),
        "stranger": b.person("zhou.kai", where=other),
        "lead": b.person("chen.hao", Role.LEAD, vision),
        "admin": b.person("zhao.rui", Role.POOL_ADMIN),
        "auditor": b.person("he.jing", Role.AUDITOR),
        "otherlead": b.person("li.na", Role.LEAD, other),
    }
    lease = b.held(cards[0], people["holder"], vision)
    rows = [
        b.row(cards[0], util=93, temp=66),
        b.row(cards[1], util=0, power_mw=None, missing={"power_mw": "not_supported"}, procs=[]),
    ]
    batch, _ = intake.batch_of(
        node_id=node.pk, message=b.message(*rows, host={"cpu": 41, "mem_used_mib": 2048})
    )
    ingest.samples_write(batches=[batch], tell=False)
    board_forget()
    return {"node": node, "cards": cards, "lease": lease, "vision": vision, **people}


def client(user: Any, language: str = "en") -> Client:
    c = Client()
    c.force_login(user)
    c.cookies["django_language"] = language
    return c


def text(response: Any) -> str:
    return text_of(response.content.decode())


def text_of(page: str) -> str:
    plain = html.unescape(re.sub(r"<[^>]+>", " ", page))
    return re.sub(r"\s+", " ", plain.replace("\u00a0", " "))


def test_everybody_signs_in_first(scene: dict[str, Any]) -> None:
    for name in ("wall", "wall-cells", "wall-sum", "wall-held"):
        assert Client().get(reverse(f"monitoring:{name}")).status_code == 302
    for name, uid in (
        ("gpu", scene["cards"][0].uid),
        ("node-live", scene["node"].uid),
        ("allocation-live", scene["lease"].allocation.uid),
    ):
        assert Client().get(reverse(f"monitoring:{name}", args=[uid])).status_code == 302


def test_wall_page_sums_and_key(scene: dict[str, Any], django_assert_max_num_queries: Any) -> None:
    c = client(scene["stranger"])
    c.get(reverse("monitoring:wall"))
    with django_assert_max_num_queries(15):
        answer = c.get(reverse("monitoring:wall"))
    page = text(answer)
    assert "3 installed = 1 allocated + 1 free + 1 down or without data" in page
    assert "Data from 2 of 3 GPUs" in page
    assert "In use 1" in page and "Free 1" in page and "No data 1" in page
    assert len(answer.content) < 60_000


def test_identity_is_fetched_once_and_asked_by_its_tag(scene: dict[str, Any]) -> None:
    c = client(scene["stranger"])
    first = c.get(reverse("monitoring:wall-cells"))
    cells = json.loads(first.content)
    assert [n[3] for n in cells["nodes"]] == ["sh-h800-09"] and len(cells["nodes"][0][5]) == 3
    assert cells["nodes"][0][5][0] == [0, str(scene["cards"][0].uid), 700]
    again = c.get(reverse("monitoring:wall-cells"), headers={"If-None-Match": first["ETag"]})
    assert again.status_code == 304 and not again.content
    packed = c.get(reverse("monitoring:wall-cells"), headers={"Accept-Encoding": "gzip"})
    assert json.loads(gzip.decompress(packed.content)) == cells


def test_pop_card_shows_the_holder_only_to_those_who_may_know_p021(scene: dict[str, Any]) -> None:
    url = reverse("monitoring:wall-card", args=[scene["cards"][0].uid])
    for who in ("holder", "lead", "admin", "auditor"):
        page = text(client(scene[who]).get(url))
        assert "Wu.Tao" in page and scene["lease"].allocation.ref in page, who
    for who in ("stranger", "otherlead"):
        page = text(client(scene[who]).get(url))
        assert "Wu.Tao" not in page and "not yours to see" in page, who
        assert "93 %" in page and "72.0 of 79.6 GiB" in page and "66 °C" in page and "621 W" in page


def test_table_twin_n_a_has_its_reason_and_is_never_0_telemetry_na(scene: dict[str, Any]) -> None:
    answer = client(scene["stranger"]).get(reverse("monitoring:wall"), {"view": "table"})
    page = answer.content.decode()
    rows = re.findall(r"<tr.*?</tr>", page, re.S)[1:]
    assert len(rows) == 3
    assert "this card or its driver does not report it" in rows[1] and ">0<" in rows[1]
    assert 'colspan="4"' in rows[2] and "none yet" in rows[2], "one cell for all measures that never were"
    assert text_of(rows[2]).count("no sample has arrived yet") == 1
    assert "Wu.Tao" not in page


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"state": "in_use"}, [0]),
        ({"state": "nonsense"}, []),
        ({"site": "shanghai"}, [0, 1, 2]),
        ({"site": "x"}, []),
        ({"q": "H800-09"}, [0, 1, 2]),
        ({"q": "nowhere"}, []),
        ({"sort": "-busy"}, [0, 1, 2]),
        ({"sort": "busy"}, [1, 0, 2]),
        ({"department": "vision"}, [0]),
        ({"department": "not-a-department"}, []),
    ],
)
def test_filters_live_in_the_url(scene: dict[str, Any], query: dict[str, str], expected: list[int]) -> None:
    if query.get("department") == "vision":
        query = {"department": str(scene["vision"].uid)}
    page = client(scene["admin"]).get(reverse("monitoring:wall"), {"view": "table", **query}).content.decode()
    assert [int(n) for n in re.findall(r"sh-h800-09 · GPU (\d)</a>", page)] == expected


def test_department_filter_never_tells_a_stranger(scene: dict[str, Any]) -> None:
    url = reverse("monitoring:wall-held")
    mine = client(scene["lead"]).get(url, {"department": str(scene["vision"].uid)}).json()
    assert mine["cells"] == [0]
    other = client(scene["stranger"]).get(url, {"department": str(scene["vision"].uid)}).json()
    assert other["cells"] == []


def test_gpu_page_in_both_languages_with_queries_in_bounds(
    scene: dict[str, Any], django_assert_max_num_queries: Any
) -> None:
    url = reverse("monitoring:gpu", args=[scene["cards"][0].uid])
    c = client(scene["holder"])
    c.get(url)
    with django_assert_max_num_queries(15):
        answer = c.get(url)
    page = text(answer)
    assert "sh-h800-09 · GPU 0" in page and "Wu.Tao" in page and "4711" in page and "python" in page
    assert "SM activity N/A: this card or its driver does not report it" in page
    assert len(answer.content) < 60_000
    assert client(scene["holder"], "zh-hans").get(url).status_code == 200


def test_processes_follow_the_lease_p020(scene: dict[str, Any]) -> None:
    url = reverse("monitoring:gpu", args=[scene["cards"][0].uid])
    page = text(client(scene["stranger"]).get(url))
    assert "4711" not in page and "Wu.Tao" not in page and "93" not in page.split("Live")[0]
    assert "Processes are shown to the holder" in page
    assert (
        client(scene["stranger"])
        .get(reverse("monitoring:gpu-processes", args=[scene["cards"][0].uid]))
        .status_code
        == 200
    )


def test_allocation_parts_are_404_for_a_stranger(scene: dict[str, Any]) -> None:
    uid = scene["lease"].allocation.uid
    for name in ("allocation-live", "allocation-metrics", "allocation-history", "allocation-history-csv"):
        url = reverse(f"monitoring:{name}", args=[uid])
        assert client(scene["stranger"]).get(url).status_code == 404, name
        assert client(scene["holder"]).get(url).status_code == 200, name
        assert client(scene["lead"]).get(url).status_code == 200, name
    assert client(scene["stranger"]).get(f"/api/v1/allocations/{uid}/history/").status_code == 404


def test_the_page_of_a_lease_that_starts_is_loaded_anew_when_it_runs(scene: dict[str, Any]) -> None:
    allocation = scene["lease"].allocation
    url = reverse("monitoring:allocation-live", args=[allocation.uid])
    c = client(scene["holder"])
    for state in ("reserved", "starting", "stopping"):
        type(allocation).objects.filter(pk=allocation.pk).update(state=state)
        assert f'hx-get="{url}?seen={state}"' in c.get(url).content.decode()
    same, moved = (c.get(url, {"seen": state}) for state in ("stopping", "running"))
    assert (same.status_code, same.get("HX-Refresh")) == (204, None)
    assert (moved.status_code, moved.get("HX-Refresh")) == (204, "true")
    type(allocation).objects.filter(pk=allocation.pk).update(state="running")
    assert "?seen=" not in c.get(url).content.decode(), "a lease that runs is not asked for again and again"
    assert client(scene["stranger"]).get(url, {"seen": "running"}).status_code == 404


def test_node_fragment(scene: dict[str, Any]) -> None:
    page = text(
        client(scene["stranger"]).get(
            reverse("monitoring:node-live", args=[scene["node"].uid]), headers={"HX-Request": "true"}
        )
    )
    assert "CPU 41 %" in page and "memory 2 / 1,024 GiB" in page and "not yours to see" in page


def test_history_figure_table_and_csv_say_the_same(scene: dict[str, Any]) -> None:
    start = now().astimezone(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
    card = scene["cards"][2]
    rows = [
        b.row(
            card,
            start + timedelta(seconds=10 * i),
            util=40 + i,
            power_mw=None,
            missing={"power_mw": "not_supported"},
        )
        for i in range(12)
    ]
    batch, _ = intake.batch_of(node_id=scene["node"].pk, message=b.message(*rows))
    ingest.samples_write(batches=[batch], tell=False)
    rollup_run(force=True)
    c = client(scene["stranger"])
    figure = c.get(reverse("monitoring:gpu-history", args=[card.uid]), {"span": "7d"}).json()
    row = figure["table"]["rows"][0]
    assert row[1:] == [45.5, 51.0, "N/A", 72.0, 72.0, 66.0, 66, "N/A", "N/A", 3.3, 12]
    mean = figure["data"][1]
    assert mean["y"] == [45.5] and mean["x"] == [start.isoformat(timespec="seconds").replace("+00:00", "Z")]
    assert figure["data"][7]["y"] == [None]
    sheet = c.get(reverse("monitoring:gpu-history-csv", args=[card.uid]), {"span": "7d"}).content.decode()
    assert sheet.startswith("\ufeff")
    assert sheet.splitlines()[1].split(",")[1:] == [
        "45.5",
        "51.0",
        "",
        "72.0",
        "72.0",
        "66.0",
        "66",
        "",
        "",
        "3.3",
        "12",
        "UTC",
    ]
    answer = c.get(
        f"/api/v1/gpus/{card.uid}/history/", {"step": "60", "from": start.isoformat().replace("+00:00", "Z")}
    ).json()
    assert [(p["samples"], p["busy_percent"], p["power_watts"], p["coverage"]) for p in answer["points"]] == [
        (6, 42.5, None, 1.0),
        (6, 48.5, None, 1.0),
    ]


def test_api_samples_and_state(scene: dict[str, Any]) -> None:
    c = client(scene["stranger"])
    answer = c.get(f"/api/v1/gpus/{scene['cards'][1].uid}/samples/").json()
    (sample,) = answer["samples"]
    assert (sample["busy_percent"], sample["power_watts"], sample["memory_used_mib"]) == (0, None, 73728)
    state = c.get("/api/v1/telemetry/state/", {"state": "free"}).json()
    (row,) = state["results"]
    assert (
        row["busy_percent"] == 0 and row["power_watts"] is None and row["missing"]["power"] == "not_supported"
    )
    assert c.get("/api/v1/telemetry/state/").json()["results"][0]["allocation"] is None
    assert client(scene["holder"]).get("/api/v1/telemetry/state/").json()["results"][0]["allocation"] == str(
        scene["lease"].allocation.uid
    )


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("samples", {"from": "yesterday"}, "invalid"),
        ("samples", {"from": "2026-06-16T14:03:12"}, "invalid"),
        ("samples", {"slot": "-1"}, "invalid"),
        ("samples", {"from": "2026-01-01T00:00:00Z"}, "invalid"),
        ("samples", {"color": "red"}, "unknown_filter"),
        ("history", {"step": "7"}, "invalid"),
        ("history", {"step": "60", "from": "2020-01-01T00:00:00Z"}, "invalid"),
    ],
)
def test_bad_input_is_a_problem_with_a_code(
    scene: dict[str, Any], path: str, query: dict[str, str], code: str
) -> None:
    answer = client(scene["stranger"]).get(f"/api/v1/gpus/{scene['cards'][0].uid}/{path}/", query)
    assert answer.status_code == 400 and answer.json()["code"] == code
    assert answer["Content-Type"] == "application/problem+json"


def test_metrics_leave_out_what_is_missing_and_are_not_for_everybody_p019(scene: dict[str, Any]) -> None:
    page = Client().get("/metrics").content.decode()
    assert 'gpupool_gpus{model="NVIDIA H800",site="shanghai",state="free"} 1.0' in page
    first, second, third = (str(card.uid) for card in scene["cards"])
    busy = [line for line in page.splitlines() if line.startswith("gpupool_gpu_busy_ratio{")]
    assert any(first in line and line.endswith(" 0.93") for line in busy)
    assert any(second in line and line.endswith(" 0.0") for line in busy) and not any(
        third in line for line in busy
    )
    assert not any(
        second in line for line in page.splitlines() if line.startswith("gpupool_gpu_power_watts{")
    )
    assert Client().get("/metrics", REMOTE_ADDR="10.1.2.3").status_code == 401
    assert (
        Client()
        .get("/metrics", REMOTE_ADDR="10.1.2.3", headers={"Authorization": "Bearer gpp_wrong"})
        .status_code
        == 401
    )
    assert Client().get("/metrics", headers={"X-Forwarded-For": "10.1.2.3"}).status_code == 401


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        ({}, "no_data", "stale"),
        ({"schedulable": "maintenance"}, "maintenance", "stale"),
        ({"condition": "fault"}, "fault", "stale"),
        ({"condition": "vanished"}, "lost", "lost"),
    ],
)
def test_a_card_that_nothing_measures_now_has_no_number_anywhere(
    scene: dict[str, Any], change: dict[str, str], state: str, reason: str
) -> None:
    """Whatever is known of it otherwise: pop card, table and its order, API, card page, small gauges and /metrics."""
    card, node = scene["cards"][0], scene["node"]
    for name, value in change.items():
        setattr(node if name == "schedulable" else card, name, value)
    node.save()
    card.save()
    moment = now() if reason == "lost" else now() + timedelta(seconds=61)
    with set_clock(moment):
        batch, refused = intake.batch_of(
            node_id=node.pk, message=b.message(b.row(scene["cards"][1], moment, util=7, procs=[]))
        )
        assert not refused
        ingest.samples_write(batches=[batch], tell=False)
        board_forget()
        c = client(scene["holder"])
        row, other, _third = c.get("/api/v1/telemetry/state/").json()["results"]
        assert (row["state"], row["gpu"]) == (state, str(card.uid))
        measured = (
            "busy_percent",
            "memory_used_mib",
            "memory_total_mib",
            "temperature_celsius",
            "power_watts",
        )
        assert [row[name] for name in measured] == [None] * 5
        assert row["missing"] == dict.fromkeys(("busy", "sm", "mem", "mem_total", "temp", "power"), reason)
        assert row["sampled_at"] is not None and other["busy_percent"] == 7
        why = {"stale": "the last sample is too old", "lost": "the card or its node is not heard of any more"}
        pop = c.get(reverse("monitoring:wall-card", args=[card.uid])).content.decode()
        assert text_of(pop).count(why[reason]) == 4 and not re.search(r"GiB|\d [%W]|°C", text_of(pop))
        table = c.get(reverse("monitoring:wall"), {"view": "table", "sort": "-busy"}).content.decode()
        rows = re.findall(r"<tr.*?</tr>", table, re.S)[1:]
        assert [re.search(r"GPU (\d)</a>", line).group(1) for line in rows] == ["1", "0", "2"]  # type: ignore[union-attr]
        assert text_of(rows[1]).count(why[reason]) == 4
        page = text(c.get(reverse("monitoring:gpu", args=[card.uid])))
        assert f"GPU busy (time) N/A: {why[reason]}" in page
        mini = text(c.get(reverse("monitoring:allocation-mini", args=[scene["lease"].allocation.uid])))
        assert mini.count("N/A") == 2 and "%" not in mini
        told = [line for line in c.get("/metrics").content.decode().splitlines() if str(card.uid) in line]
        assert [line.split("{")[0] for line in told] == ["gpupool_gpu_last_sample_timestamp_seconds"]


def test_what_a_driver_tells_beside_the_measures_p13_p14_p23_p32(scene: dict[str, Any]) -> None:
    """By name with unit in the API, in words on the page, what was due and did not come with its reason."""
    card = scene["cards"][1]
    moment = now().replace(microsecond=0) + timedelta(seconds=1)
    row = b.row(
        card, moment, sm_clock=1410, throttle=0x4 | 0x40, pcie_gen=4, pcie_tx_kib_s=2048, ecc_uncorr=2,
        remap_pending=1, persistence=0, fabric_state=1, energy_mj=7_200_000_000, fan="[N/A]",
    )  # fmt: skip
    values = {
        "sm_clock_mhz": 1410,
        "throttle_reasons": ["power_cap", "thermal_hardware"],
        "fan_percent": None,
        "energy_joules": 7_200_000.0,
        "pcie_generation": 4,
        "pcie_sent_kib_s": 2048,
        "fabric_state": "not_started",
        "ecc_uncorrected": 2,
        "remap_pending": True,
        "persistence_mode": False,
    }
    c = client(scene["stranger"])
    with set_clock(moment):
        batch, refused = intake.batch_of(node_id=scene["node"].pk, message=b.message(row))
        assert not refused
        ingest.samples_write(batches=[batch], tell=False)
        board_forget()
        told = c.get(f"/api/v1/gpus/{card.uid}/details/").json()
        page = text(c.get(reverse("monitoring:gpu", args=[card.uid])))
    assert (told["values"], told["missing"]) == (values, {"fan_percent": "not_supported"})
    assert (told["source"], told["sampled_at"]) == ("agent", moment.isoformat())
    for line in (
        "SM clock 1,410 MHz",
        "Clocks held down by the power limit, heat (hardware)",
        "Fan N/A",
        "Energy since the driver was loaded 2.0 kWh",
        "PCIe sent 2.0 MiB/s",
        "ECC errors not corrected since the driver was loaded 2 a reset is needed",
        "Row remapping is pending yes takes effect at the next reset",
        "Persistence mode no the driver unloads when idle",
        "NVSwitch fabric not started: CUDA fails on it look at the Fabric Manager",
    ):
        assert line in page, line
    assert "Tensor" not in page, "what its source never tells is not there"
    with set_clock(moment + timedelta(seconds=61)):
        old = c.get(f"/api/v1/gpus/{card.uid}/details/").json()
        assert old["values"] == dict.fromkeys(values)
        assert old["missing"] == dict.fromkeys(values, "stale")
    empty = c.get(f"/api/v1/gpus/{scene['cards'][2].uid}/details/").json()
    assert (empty["values"], empty["sampled_at"]) == ({}, None)


def test_sm_activity_stands_beside_busy_time_where_a_source_tells_it_p01(scene: dict[str, Any]) -> None:
    card, at = scene["cards"][0], now() - timedelta(minutes=10)
    c = client(scene["stranger"])
    url = reverse("monitoring:gpu-history", args=[card.uid])
    plain = c.get(url, {"span": "1h"}).json()
    batch, _ = intake.batch_of(node_id=scene["node"].pk, message=b.message(b.row(card, at, util=97, sm=12)))
    ingest.samples_write(batches=[batch], tell=False)
    rollup_run(force=True)
    figure = c.get(url, {"span": "1h"}).json()
    assert len(plain["data"]) in (0, 8) and len(figure["data"]) == 9
    busy, sm = figure["data"][1], figure["data"][8]
    assert (busy["y"][0], sm["y"][0], sm["name"], sm["yaxis"]) == (97.0, 12.0, "SM activity, %", "y")
    assert figure["layout"]["annotations"][0]["text"] == "GPU busy (time), % · dashed: SM activity"


def test_hours_of_the_week_leave_holes_and_the_future_empty(scene: dict[str, Any]) -> None:
    from zoneinfo import ZoneInfo

    from monitoring.selectors.gpu_page import hours

    moment = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
    with set_clock(moment):
        card = scene["cards"][2]
        batch, _ = intake.batch_of(
            node_id=scene["node"].pk, message=b.message(b.row(card, moment - timedelta(hours=2), util=50))
        )
        ingest.samples_write(batches=[batch], tell=False)
        rollup_run(force=True)
        week = hours(card, ZoneInfo("Asia/Shanghai"))
    today = week[-1]["hours"]
    assert (
        today[12] == {"value": 50.0, "step": 3}
        and today[11] is None
        and today[14] is None
        and today[15] == {"ahead": True}
    )


@pytest.fixture
def split(scene: dict[str, Any]) -> dict[str, Any]:
    """A split card: NVML gives no activity; one slice reports no memory either."""
    card = scene["cards"][2]
    card.mig_enabled = True
    card.save()
    first, second = b.slice_of(card, 1, 0, 4), b.slice_of(card, 2, 4, 2, "2g.20gb")
    b.held(card, scene["holder"], scene["vision"], mig_slice=first)
    nothing = {"util": "not_supported", "sm": "not_supported"}
    rows = [
        b.row(card, util=None, missing=nothing, mem_used=30_000),
        b.row(card, mig=first.uuid, util=None, missing=nothing, mem_used=12_000, mem_total=19_968),
        b.row(
            card,
            mig=second.uuid,
            util=None,
            mem_used=None,
            mem_total=None,
            mem_reserved=None,
            missing=nothing,
        ),
    ]
    batch, refused = intake.batch_of(node_id=scene["node"].pk, message=b.message(*rows))
    assert not refused
    ingest.samples_write(batches=[batch], tell=False)
    board_forget()
    return {**scene, "card": card}


def test_mig_telemetry_p063_p03_a_split_card_is_not_measurable_not_0(split: dict[str, Any]) -> None:
    state = client(split["stranger"]).get("/api/v1/telemetry/state/", {"state": "split"}).json()["results"]
    (row,) = state
    assert row["busy_percent"] is None and row["missing"]["busy"] == "not_supported"
    assert row["memory_used_mib"] == 30_000 and row["power_watts"] == 621.0


def test_mig_telemetry_p064_a_slice_without_memory_is_n_a_and_never_its_parents(
    split: dict[str, Any],
) -> None:
    page = client(split["holder"]).get(reverse("monitoring:gpu", args=[split["card"].uid])).content.decode()
    table = page[page.index("Memory slots") :]
    rows = re.findall(r"<tr>.*?</tr>", table[: table.index("</table>")], re.S)
    assert "3g.40gb" in rows[0] and "11.7" in rows[0] and "Wu.Tao" in rows[0] and "0–3" in rows[0]
    assert "2g.20gb" in rows[1] and "29.3" not in rows[1] and "its source does not report it" in rows[1]
    cells = json.loads(client(split["holder"]).get(reverse("monitoring:wall-cells")).content)
    assert cells["nodes"][0][5][2][3] == [["3g.40gb", 0, 4], ["2g.20gb", 4, 2]]
    card = text(
        client(split["stranger"]).get(
            reverse("monitoring:wall-card", args=[split["card"].uid]), {"slot": "2"}
        )
    )
    assert "3g.40gb" in card and "In use" in card and "counted once per card, not per slice" in card
    assert "not yours to see" in card


def test_allocation_of_a_slice_is_measured_by_its_slice(split: dict[str, Any]) -> None:
    from monitoring.selectors.access import lease_keys
    from pool.models import Lease

    lease = Lease.objects.get(mig_slice__profile="3g.40gb")
    assert lease_keys(lease.allocation) == [(split["card"].pk, 2)]
