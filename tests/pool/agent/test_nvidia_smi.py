"""`nvidia-smi` as the reader of cards: real documents of several schemas, broken output, the collector's fallback."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from pool.agent import nvidia_smi, smi_csv, smi_xml
from pool.agent.collector import Collector, Readers
from pool.agent.readings import NvmlDown
from pool.agent.smi_cells import number, present
from tests.samples import authored, needs_real, real

A100 = "GPU-00000005-0000-4000-8000-000000000005"


@needs_real
def test_schema_12_a_mig_card_has_slices_and_no_utilization_p03_p05() -> None:
    node, cards = smi_xml.parse(real("nvsmi_a100_sxm4_v12.xml"))
    assert node == {"driver": "535.54.03", "cuda": "12.2"}
    card = cards[0]
    assert (card["uuid"], card["index"], card["name"], card["bus"]) == (
        A100,
        0,
        "NVIDIA A100-SXM4-80GB",
        "00000000:01:00.0",
    )
    assert card["mig_capable"] and card["mig_enabled"] and card["pcie"] == {"gen": 4, "width": 16}
    values, missing = card["values"], card["missing"]
    assert "util" not in values and missing["util"] == "not_supported"
    assert (values["mem_total"], values["mem_used"], values["mem_reserved"], values["mem_free"]) == (
        81920,
        50,
        869,
        80999,
    )
    assert (values["temp"], values["mem_temp"], values["slowdown_c"]) == (27, 44, 89)
    assert (values["power_mw"], values["power_limit_mw"], values["sm_clock"]) == (67030, 500_000, 1275)
    assert (values["throttle"], values["persistence"], values["ecc_uncorr"]) == (0, 0, 0)
    assert values["pcie_tx_kib_s"] == 3906, "4000 KB/s are thousands of bytes (pitfall P31)"
    assert missing["fan"] == missing["remap_pending"] == missing["retired_pages"] == "not_supported"
    assert [(part["device"], part["gi"], part["values"]) for part in card["slices"]] == [
        (n, n + 3, {"mem_total": 19968, "mem_used": 12, "mem_reserved": 0, "mem_free": 19955})
        for n in range(4)
    ]


@needs_real
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "nvsmi_tesla_t4.xml",
            {"util": 0, "temp": 40, "power_mw": 26780, "power_limit_mw": 70000, "throttle": 0},
        ),
        (
            "nvsmi_a10g.xml",
            {"util": 0, "temp": 17, "power_mw": 25580, "power_limit_mw": 300_000, "throttle": 1},
        ),
        (
            "nvsmi_rtx_4000_sff_ada_v13.xml",
            {
                "temp": 38,
                "tlimit": 49,
                "power_mw": 8810,
                "power_averaged": 1,
                "mem_total": 20475,
                "mem_reserved": 460,
                "remap_pending": 0,
                "remap_failure": 0,
                "remap_corr": 0,
                "throttle": 1,
                "pcie_gen": 1,
                "pcie_gen_max": 4,
            },
        ),
        ("nvsmi_rtx_3090_v12.xml", {"mem_total": 24576}),
        ("nvsmi_gtx_1070_ti.xml", {"util": 0, "mem_total": 4096, "mem_used": 42, "temp": 39, "fan": 100}),
    ],
)
def test_values_of_each_schema(file: str, expected: dict[str, int]) -> None:
    _, cards = smi_xml.parse(real(file))
    assert {name: cards[0]["values"].get(name) for name in expected} == expected


@needs_real
def test_power_na_and_old_documents_say_why_p08_p12() -> None:
    _, cards = smi_xml.parse(real("nvsmi_gtx_1070_ti.xml"))
    missing = cards[0]["missing"]
    assert "power_mw" not in cards[0]["values"] and missing["power_mw"] == "not_supported"
    assert missing["mem_reserved"] == missing["throttle"] == missing["ecc_uncorr"] == "not_supported"
    _, cards = smi_xml.parse(real("nvsmi_tesla_t4.xml"))
    assert cards[0]["missing"]["fan"] == "not_supported"


@needs_real
def test_processes_of_a_card() -> None:
    _, cards = smi_xml.parse(real("nvsmi_rtx_4000_sff_ada_v13.xml"))
    assert [(p["pid"], p["name"], p["mem_mib"]) for p in cards[0]["processes"]] == [
        (1842, "python", 410),
        (3190, "python", 451),
        (4937, "python", 160),
        (34626, "python", 183),
    ]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("[N/A]", (None, "not_supported")),
        ("N/A", (None, "not_supported")),
        ("[Not Supported]", (None, "not_supported")),
        ("None", (None, "not_supported")),
        ("", (None, "not_supported")),
        (None, (None, "not_supported")),
        ("Requested functionality has been deprecated", (None, "not_supported")),
        ("[Unknown Error]", (None, "error")),
        ("ERR!", (None, "error")),
        ("[GPU is lost]", (None, "gpu_lost")),
        ("[GPU requires reset]", (None, "reset_required")),
        ("[Insufficient Permissions]", (None, "not_permitted")),
        ("67.03 W", (67.03, "")),
        ("81920 MiB", (81920.0, "")),
        ("16x", (16.0, "")),
        ("-7 C", (-7.0, "")),
        ("NVIDIA H200", (None, "not_a_number")),
        ("1e400", (None, "not_a_number")),
    ],
)
def test_one_normaliser_for_csv_and_xml_p26_p27(cell: str | None, expected: tuple[float | None, str]) -> None:
    assert number(cell) == expected


def test_a_broken_card_in_the_csv_loses_no_other_p25() -> None:
    fields = ("index", "uuid", "name", "temperature.gpu", "memory.used")
    cards, failed = smi_csv.cards(authored("nvsmi/02_query_with_error_line.csv"), fields)
    assert [(c["index"], c["uuid"], c["values"]) for c in cards] == [
        (0, "GPU-a0000001-1111-4222-8333-000000000001", {"temp": 30, "mem_used": 9751}),
        (2, "GPU-a0000003-1111-4222-8333-000000000003", {"temp": 31, "mem_used": 9751}),
    ]
    assert failed == ["0000:02:00.0"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("03_fail_1_driver_mismatch.txt", "driver_mismatch"),
        ("03_fail_3_no_driver.txt", "no_driver"),
        ("03_fail_4_no_devices.txt", "no_devices"),
        ("03_fail_6_not_found.txt", "not_found"),
    ],
)
def test_a_whole_failure_has_a_state(file: str, code: str) -> None:
    assert nvidia_smi.failure(authored("nvsmi/" + file)) == code


def test_processes_whose_names_hold_commas_and_memory_that_is_not_told_p20() -> None:
    apps = smi_csv.apps(authored("nvsmi/06_compute_apps.csv"))
    assert apps == {
        "GPU-a0000001-1111-4222-8333-000000000001": [
            {"pid": 4242, "name": "python", "mem_mib": 77010},
            {"pid": 4243, "name": "", "mem_mib": 312},
        ],
        "GPU-a0000002-1111-4222-8333-000000000002": [
            {"pid": 4244, "name": "", "mem_mib": None},
            {"pid": 17, "name": "run", "mem_mib": 10},
        ],
    }


def test_the_list_of_mig_devices_p22() -> None:
    found = smi_csv.listed(authored("nvsmi/04_list_new.txt"))
    assert found["GPU-a0000002-1111-4222-8333-000000000002"] == []
    assert [
        (d["device"], d["profile"], d["uuid"][:12]) for d in found["GPU-a0000001-1111-4222-8333-000000000001"]
    ] == [
        (0, "3g.20gb", "MIG-b0000001"),
        (1, "2g.10gb", "MIG-b0000002"),
        (2, "1c.2g.10gb", "MIG-b0000003"),
    ]


def test_both_spellings_of_possible_placements() -> None:
    found = smi_csv.placements(authored("nvsmi/07_mig_lgipp.txt").split("# RTX")[0])
    assert found[0, 9] == ((0, 4), 4) and found[0, 5] == ((0,), 4) and found[0, 0] == ((0,), 8)
    assert found[0, 15] == ((0, 2, 4, 6), 2) and len(found) == 7
    other = smi_csv.placements(authored("nvsmi/07_mig_lgipp.txt").split("# RTX")[1])
    assert other[0, 14] == ((0, 3, 6, 9), 3) and other[0, 0] == ((0,), 12)


LGI = """
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 1g.20gb         15        3          0:2     |
|   0  MIG 1g.20gb         15        4          2:2     |
|   0  MIG 1g.20gb         15        5          4:2     |
|   0  MIG 1g.20gb         15        6          6:2     |
+-------------------------------------------------------+
"""


def tool(folder: Path, **answers: str) -> Path:
    """A program that answers as the files say: `xml`, `csv`, `apps`, `list`, `lgi`, `lgipp`; else it fails."""
    for name, text in answers.items():
        (folder / name).write_text(text)
    path = folder / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        f'cd "{folder}"\n'
        'case "$*" in\n'
        '"-q -x") f=xml;; --query-gpu*) f=csv;; --query-compute*) f=apps;; -L) f=list;;\n'
        '"mig -lgi") f=lgi;; "mig -lgipp") f=lgipp;; *) f=none;; esac\n'
        'echo "$*" >> calls\n'
        'if [ -e "$f" ]; then cat "$f"; else echo "No devices were found"; exit 6; fi\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def mig_list(uuid: str, count: int = 4) -> str:
    lines = [f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {uuid})"]
    lines += [
        f"  MIG 1g.20gb     Device  {n}: (UUID: MIG-{n}0000000-1111-5222-9333-000000000000)"
        for n in range(count)
    ]
    return "\n".join(lines) + "\n"


@needs_real
async def test_where_nvml_is_missing_the_collector_asks_the_tool(tmp_path: Path, monkeypatch: Any) -> None:
    path = tool(
        tmp_path,
        xml="warning: infoROM is corrupted\n" + real("nvsmi_a100_sxm4_v12.xml"),
        list=mig_list(A100),
        lgi=LGI,
    )
    monkeypatch.setenv("GPUPOOL_NVIDIA_SMI", str(path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    collector = Collector([sys.executable, "-m", "pool.agent", "_collect"])
    inventory = await collector.ask("inventory")
    assert inventory["ok"] and inventory["source"] == "nvidia-smi" and inventory["driver"] == "535.54.03"
    card = next(c for c in inventory["gpus"] if c["uuid"] == A100)
    assert [
        (s["profile"], s["gi"], s["start"], s["size"], s["memory_mib"]) for s in card["mig"]["slices"]
    ] == [("1g.20gb", n + 3, n * 2, 2, 19968) for n in range(4)]
    answer = await collector.ask("sample")
    rows = {row[1] or row[0]: row for row in answer["rows"]}
    assert rows[A100][3]["power_mw"] == 67030 and "util" not in rows[A100][3]
    part = rows["MIG-20000000-1111-5222-9333-000000000000"]
    assert part[0] == A100 and part[3]["mem_used"] == 12 and part[4]["util"] == "not_supported"
    await collector.close()


@needs_real
def test_a_card_that_the_tool_no_longer_tells_of_is_lost(tmp_path: Path) -> None:
    reader = nvidia_smi.NvidiaSmi(str(tool(tmp_path, xml=real("nvsmi_tesla_t4.xml"))))
    uuid = reader.inventory()["gpus"][0]["uuid"]
    assert [row[0] for row in reader.sample()] == [uuid]
    (tmp_path / "xml").write_text(real("nvsmi_a10g.xml"))
    rows = {row[0]: row for row in reader.sample()}
    assert rows[uuid][3] == {} and set(rows[uuid][4].values()) == {"gpu_lost"}


@needs_real
def test_mig_uuids_are_read_anew_when_instances_change_p22(tmp_path: Path) -> None:
    xml = real("nvsmi_a100_sxm4_v12.xml")
    reader = nvidia_smi.NvidiaSmi(str(tool(tmp_path, xml=xml, list=mig_list(A100))))
    reader.inventory()
    assert len([row for row in reader.sample() if row[0] == A100 and row[1]]) == 4
    first = xml.index("<mig_device>")
    (tmp_path / "xml").write_text(xml[:first] + xml[xml.index("</mig_device>") + len("</mig_device>") :])
    (tmp_path / "list").write_text(
        mig_list(A100).replace("Device  0: (UUID: MIG-0", "Device  9: (UUID: MIG-9")
    )
    rows = [row[1] for row in reader.sample() if row[0] == A100 and row[1]]
    assert rows == [f"MIG-{n}0000000-1111-5222-9333-000000000000" for n in (1, 2, 3)]
    assert (tmp_path / "calls").read_text().count("-L\n") == 2


def test_without_xml_the_csv_is_read(tmp_path: Path) -> None:
    line = (
        "0, GPU-a0000001-1111-4222-8333-000000000001, Tesla T4, 00000000:00:04.0, [N/A], 15360, 500, 14500, 45, 88, "
        "31.5, 70.00, 1590, 5000, [N/A]\n"
    )
    apps = authored("nvsmi/06_compute_apps.csv")
    reader = nvidia_smi.NvidiaSmi(
        str(tool(tmp_path, xml="Field not known\n", csv="warning\n" + line, apps=apps))
    )
    ((uuid, _, _, values, missing, processes),) = reader.sample()
    assert uuid == "GPU-a0000001-1111-4222-8333-000000000001"
    assert (values["mem_total"], values["mem_free"], values["util"], values["power_mw"]) == (
        15360,
        14500,
        88,
        31500,
    )
    assert missing["fan"] == missing["sm"] == "not_supported" and "fan" not in values
    assert [(p["pid"], p["mem_mib"]) for p in processes] == [(4242, 77010), (4243, 312)]


@pytest.mark.parametrize("file", ["03_fail_1_driver_mismatch.txt", "03_fail_4_no_devices.txt"])
def test_a_tool_that_fails_gives_its_state(tmp_path: Path, file: str) -> None:
    reader = nvidia_smi.NvidiaSmi(str(tool(tmp_path, xml=authored("nvsmi/" + file))))
    with pytest.raises(NvmlDown) as caught:
        reader.inventory()
    assert caught.value.reason == {"03_fail_1": "driver_mismatch", "03_fail_4": "no_devices"}[file[:9]]


def test_no_tool_and_no_nvml_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPOOL_NVIDIA_SMI", str(tmp_path / "nothing"))
    assert nvidia_smi.program() is None
    monkeypatch.setattr("pool.agent.nvml.load", lambda: _raise(NvmlDown("no_driver")))
    assert Readers().answer("inventory") == {"ok": False, "reason": "no_driver"}
    monkeypatch.setenv("GPUPOOL_NVIDIA_SMI", str(tool(tmp_path)))
    assert Readers().answer("inventory") == {"ok": False, "reason": "no_devices"}


def _raise(error: Exception) -> None:
    raise error


def test_entities_are_not_expanded() -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><nvidia_smi_log><gpu/></nvidia_smi_log>'
    with pytest.raises(ValueError):
        smi_xml.parse(bomb)
    with pytest.raises(ValueError):
        smi_xml.parse("<?xml version='1.0'?><nvidia_smi_log><gpu></nvidia_smi_log>")


def test_a_name_is_a_name() -> None:
    assert present("NVIDIA H200") == "NVIDIA H200" and present("[N/A]") is None
