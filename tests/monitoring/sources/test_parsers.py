"""What exporters print, of all generations, leads to the values and reasons that each sample's index asks for."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from monitoring.sources import dcgm, prometheus, smi_exporter, text
from monitoring.sources.reading import Reading, Scrape, sample_of
from tests.samples import authored, needs_real, real

NOW = 1_800_000_000_000
ONE, TWO = "GPU-a0000001-1111-4222-8333-000000000001", "GPU-a0000002-1111-4222-8333-000000000002"
H100 = "GPU-a000000a-1111-4222-8333-00000000000a"


def read(body: str, *, complete: bool = True) -> Scrape:
    into = Scrape()
    series = list(text.metrics(body, into.problems, complete=complete))
    dcgm.scrape((m for m in series if m.name[:4].lower() == "dcgm"), into)
    dcgm.settle(into)
    smi_exporter.scrape((m for m in series if m.name.startswith("nvidia_smi_")), into)
    return into


def sample(reading: Reading, **more):
    return sample_of(reading, at_ms=NOW, source="exporter", **more)


def test_old_lower_case_names_and_blanks_as_numbers_p17() -> None:
    """G083: old names; G094: a measure that is gone is missing; P067: so are processes, with the reason."""
    got = read(authored("dcgm/01_compat_1x_lowercase_blanks.prom"))
    assert set(got.readings) == {(ONE, None), (TWO, None)} and not got.problems
    one, two = sample(got.readings[ONE, None]), sample(got.readings[TWO, None])
    assert (one.util_pm, one.temp_c, one.power_mw, one.sm_clock_mhz) == (970, 61, 287_412, 1410)
    assert (one.mem_used_mib, one.mem_total_mib, one.sm_pm) == (39094, 40305, None)
    assert one.missing["mem_temp"] == "blank" and "mem_temp" not in one.more
    assert (one.missing["sm"], one.missing["processes"]) == ("not_supported", "not_reported")
    assert two.util_pm == 0 and got.readings[TWO, None].xid == 31 and got.readings[ONE, None].xid == 0


@pytest.mark.parametrize(
    "raw",
    ["2147483632", "2147483635", "9223372036854775792", "9223372036854775794", "9.223372036854775807e18",
     "140737488355328", "140737488355331", "9.2233720368547758e+18"],
)  # fmt: skip
def test_every_blank_number_is_missing_p17(raw: str) -> None:
    got = read(f'DCGM_FI_DEV_GPU_UTIL{{UUID="{ONE}"}} {raw}\nDCGM_FI_DEV_POWER_USAGE{{UUID="{ONE}"}} {raw}\n')
    one = sample(got.readings[ONE, None])
    assert (one.util_pm, one.power_mw) == (None, None)
    assert (one.missing["util"], one.missing["power_mw"]) == ("blank", "blank")


def test_a_blank_after_the_comma_and_no_model_p18() -> None:
    """P068: a card without a model is a card."""
    got = read(authored("dcgm/02_exporter_2x_space_after_comma.prom"))
    reading = got.readings[ONE, None]
    one = sample(reading, total_mib=81920)
    assert (one.sm_clock_mhz, one.power_mw, one.missing["power_mw"]) == (1395, None, "blank")
    assert reading.model == "" and reading.index == 0 and one.mem_total_mib == 81920 and not got.problems


def test_rows_per_pod_are_one_card_with_its_pods_p18_p29() -> None:
    """G086: power once, however many pods share the card; G089, G112: the reserved part stands by itself."""
    got = read(authored("dcgm/04_exporter_4x_hostname_lowercase_shared.prom"))
    assert set(got.readings) == {(H100, None)}, "rows of CPUs and links are no cards"
    reading = got.readings[H100, None]
    assert reading.hosts == {"gpu-node-07"} and reading.model == "NVIDIA H100 80GB HBM3"
    assert [w["pod"] for w in reading.workloads] == ["infer-7f9-abcde", "infer-5c2-fghij"]
    assert (reading.xid, reading.xid_counts, got.driver) == (79, {79: 1}, "580.95.05")
    one = sample(reading)
    assert (one.util_pm, one.sm_pm, one.power_mw, one.temp_c) == (550, 551, 331_000, 41)
    assert (one.mem_used_mib, one.mem_reserved_mib, one.mem_total_mib) == (41057, 492, 81559)
    assert (one.more["shared"], one.more["energy_mj"]) == (2, 5_123_456_789)
    assert "nvlink_rx_kib_s" not in one.more, "the unit of that total differs by driver (P31)"


def test_rows_per_job_are_one_card() -> None:
    got = read(authored("dcgm/05_slurm_hpc_job_labels.prom"))
    (reading,) = got.readings.values()
    assert reading.workloads == [{"job": "4711"}, {"job": "4712"}]
    one = sample(reading)
    assert (one.util_pm, one.sm_pm, one.power_mw, one.mem_used_mib) == (880, 900, 300_000, 80000)


def test_a_bad_line_loses_no_other() -> None:
    got = read(authored("dcgm/07_text_format_edge_cases.prom"))
    by_number = {int(uuid[11]): reading for (uuid, _), reading in got.readings.items()}
    assert by_number[1].model == 'a "quoted" \\ name, with comma'
    assert by_number[1].workloads == [{"pod": "x}y"}]
    one = sample(by_number[1])
    assert (one.util_pm, one.mem_used_mib) == (100, 12), "an exponent, and a last line without its end"
    for number in (2, 3):
        bad = sample(by_number[number])
        assert (bad.util_pm, bad.missing["util"]) == (None, "not_a_number")
    assert by_number[4].at_ms == 1_700_000_000_000 and by_number[4].values["util"] == 42
    assert sample(by_number[5]).missing["util"] == "error"
    assert dict(got.problems) == {"bad_value": 1}


def test_a_body_that_was_cut_loses_its_last_line_only() -> None:
    body = authored("dcgm/05_slurm_hpc_job_labels.prom")
    cut = body[: body.index("80000") + 2]
    got = read(cut, complete=False)
    (reading,) = got.readings.values()
    assert "mem_used" not in reading.values, "80 of 80000 MiB would be a false number"
    assert reading.values["util"] == 88 and got.problems == {"cut": 1}
    assert read(cut).readings.popitem()[1].values["mem_used"] == 80


def test_a_flood_of_labels_and_lines_is_bounded() -> None:
    flood = ",".join(f'l{n}="x"' for n in range(100))
    long = "DCGM_FI_DEV_GPU_UTIL{" + 'a="' + "x" * 20_000 + '"} 1'
    good = f'DCGM_FI_DEV_GPU_UTIL{{UUID="{ONE}"}} 7'
    got = read("\n".join([f"DCGM_FI_DEV_GPU_UTIL{{{flood}}} 1", long, "{} 3", "}{", good, "name", 'x{a="']))
    assert got.readings[ONE, None].values == {"util": 7.0}
    assert got.problems == {"too_many_labels": 1, "long_line": 1, "bad_line": 4}
    problems: Counter[str] = Counter()
    text.SERIES_LIMIT, before = 10, text.SERIES_LIMIT
    try:
        assert len(list(text.metrics("a 1\n" * 50, problems))) == 10 and problems == {"too_many_series": 1}
    finally:
        text.SERIES_LIMIT = before


@needs_real
def test_mig_board_values_once_memory_added_activity_weighted_p03_p04() -> None:
    got = read(real("dcgm_3.1_mig_4_active.prom"))
    uuid = "GPU-00000001-0000-4000-8000-000000000001"
    assert sorted(i for u, i in got.readings if u == uuid and i is not None) == [5, 7, 8, 9]
    card = sample(got.readings[uuid, None], total_mib=40536)
    assert (card.power_mw, card.util_pm, card.missing["util"]) == (112_252, None, "not_measurable")
    assert card.sm_pm == 58, "0.408493 of one slice in seven is 5.8 %"
    used = [int(r.values["mem_used"]) for (u, i), r in got.readings.items() if i is not None]
    assert card.mem_used_mib == sum(used) and len(used) == 4 and card.mem_total_mib == 40536
    part = sample(got.readings[uuid, 8])
    assert (part.sm_pm, part.util_pm, part.power_mw, part.temp_c) == (408, None, None, None)
    assert (part.missing["util"], part.missing["power_mw"]) == ("not_measurable", "card_level")
    assert "energy_mj" not in part.more and got.readings[uuid, 8].profile == "1g.5gb"


@needs_real
def test_mig_without_instances_and_without_mig() -> None:
    (reading,) = read(real("dcgm_3.1_mig_enabled_no_instances.prom")).readings.values()
    one = sample(reading)
    assert (one.power_mw, one.sm_pm, one.util_pm) == (75_960, 0, None) and one.missing[
        "util"
    ] == "not_reported"
    assert one.more["energy_mj"] == 8_981_778 and reading.xid == 0
    (idle,) = read(real("dcgm_3.1_mig_disabled_idle.prom")).readings.values()
    assert sample(idle).util_pm == 0 and idle.workloads == []


@needs_real
def test_pods_of_two_cards() -> None:
    got = read(real("dcgm_3.1_t4_two_gpus_pod_labels.prom"))
    assert sorted(len(r.workloads) for r in got.readings.values()) == [0, 1]
    for reading in got.readings.values():
        assert reading.model == "Tesla T4" and sample(reading).temp_c is not None


@needs_real
@pytest.mark.parametrize("name", ["nvidia-h200_load", "nvidia-l40s_load", "nvidia-h200-mig_load"])
def test_an_exporter_of_base_units_p31_p27(name: str) -> None:
    got = read(real(f"nvsmi_exporter_{name}.prom"))
    assert len(got.readings) == 1 and not got.problems
    (reading,) = got.readings.values()
    one = sample(reading)
    assert reading.gpu_uuid.startswith("GPU-0000000") and reading.model.startswith("NVIDIA ")
    assert one.more["power_averaged"] == 1, "the mean of a second, and said so (P09)"
    if name != "nvidia-h200-mig_load":
        assert one.util_pm is not None and one.missing.get("util") is None
        return
    assert (one.util_pm, one.missing["util"]) == (None, "not_measurable")
    assert (one.mem_total_mib, one.mem_used_mib, one.mem_reserved_mib) == (143771, 16959, 614)
    assert (one.power_mw, one.temp_c, one.sm_clock_mhz) == (295_010, 36, 1980)
    assert (one.more["tlimit"], one.more["mem_temp"], one.more["fabric_state"]) == (46, 39, 3)
    assert [(p["pid"], p["name"], p["mem_mib"]) for p in one.processes] == [
        (12249, "python", 2194),
        (12250, "python", 1170),
        (12267, "gpu_burn", 13526),
    ]


def test_a_prometheus_answer_prefers_the_exporters_own_labels_p18() -> None:
    """G084: the exporter's own labels, not those of whoever scraped it."""
    into = Scrape()
    series = list(
        prometheus.metrics(authored("dcgm/08_prometheus_api_exported_labels.json").encode(), into.problems)
    )
    dcgm.scrape(series, into, target_labels=True)
    dcgm.settle(into)
    first = into.readings[H100, None]
    assert first.workloads == [{"namespace": "dept-a", "pod": "train-llm-0", "container": "main"}]
    assert (first.values["util"], first.at_ms, first.hosts) == (99.0, 1_700_000_000_123, {"gpu-node-07"})
    other = into.readings["GPU-a000000b-1111-4222-8333-00000000000b", None]
    assert other.workloads == [] and other.values["util"] == 0.0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"<html>", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"status":"error","error":"too many samples"}', "query_refused"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "bad_shape"),
        (b"[]", "bad_shape"),
        (b'{"status":"success","data":7}', "bad_shape"),
    ],
)
def test_what_is_no_answer_of_prometheus_says_so(body: bytes, code: str) -> None:
    with pytest.raises(prometheus.BadAnswer) as caught:
        prometheus.metrics(body, Counter())
    assert caught.value.code == code


def test_wrong_types_in_an_answer_lose_their_row_only() -> None:
    rows = [
        7,
        {"metric": 3, "value": [1, "2"]},
        {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": ONE}, "value": ["x", "2"]},
        {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": ONE}, "value": [float("inf"), "2"]},
        {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": ONE, "gpu": 4}, "value": [1, "NaN"]},
    ]
    body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}}).encode()
    problems: Counter[str] = Counter()
    found = list(prometheus.metrics(body, problems))
    assert len(found) == 1 and found[0].labels == {"UUID": ONE} and problems == {"bad_line": 4}


def test_negative_counters_and_impossible_values_are_refused_by_themselves() -> None:
    """G093: what cannot be is no value."""
    lines = {"GPU_UTIL": "250", "FB_USED": "17000000", "TOTAL_ENERGY_CONSUMPTION": "-5", "GPU_TEMP": "61"}
    got = read("\n".join(f'DCGM_FI_DEV_{name}{{UUID="{ONE}"}} {value}' for name, value in lines.items()))
    one = sample(got.readings[ONE, None])
    assert (one.util_pm, one.mem_used_mib, one.temp_c) == (None, None, 61) and "energy_mj" not in one.more
    assert [one.missing[m] for m in ("util", "mem_used", "energy_mj")] == ["out_of_range"] * 3
