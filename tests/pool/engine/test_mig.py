"""MIG geometry against the vendor's tables and worked examples."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from pool.engine.mig import Placed, geometries, geometry, geometry_for_product, is_valid

EXAMPLES = json.loads((Path(__file__).parents[2] / "data" / "mig_examples.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "example", EXAMPLES["valid_examples"], ids=lambda e: f"{e['gpu']}-{len(e['profiles'])}"
)
def test_valid_layouts_are_found(example: dict) -> None:
    table = geometry(example["gpu"])
    assert table is not None
    found = table.layout(example["profiles"])
    assert found is not None
    assert sorted(one.profile for one in found) == sorted(example["profiles"])
    assert is_valid(found, table)
    assert is_valid([Placed(*row) for row in example["witness"]], table)


@pytest.mark.parametrize("example", EXAMPLES["invalid_examples"], ids=lambda e: e["reason"])
def test_invalid_layouts_are_refused(example: dict) -> None:
    table = geometry(example["gpu"])
    assert table is not None
    assert table.layout(example["profiles"]) is None


def test_existing_instances_cannot_move() -> None:
    table = geometry("A100-40GB")
    assert table is not None
    ask = ["2g.10gb", "1g.5gb", "1g.5gb"]
    assert table.layout(ask, [Placed("3g.20gb", 0, 4)]) is None
    assert table.layout(ask, [Placed("3g.20gb", 4, 4)]) == (
        Placed("2g.10gb", 0, 2),
        Placed("1g.5gb", 2, 1),
        Placed("1g.5gb", 3, 1),
    )
    blackwell = geometry("RTX PRO 6000 Blackwell")
    assert blackwell is not None
    assert blackwell.layout(["2g.48gb"], [Placed("1g.24gb", 3, 3), Placed("1g.24gb", 6, 3)]) is None
    assert blackwell.layout(["2g.48gb"], [Placed("1g.24gb", 0, 3), Placed("1g.24gb", 3, 3)]) is not None


@pytest.mark.parametrize("key", ["A100-40GB", "A30"])
def test_number_of_distinct_sets_without_media(key: str) -> None:
    """The vendor-table check counts sets of plain profiles (no media extension), the empty one included."""
    table = geometry(key)
    assert table is not None
    names = [profile.name for profile in table.profiles if not profile.media]
    sets = [
        combo
        for size in range(table.compute_slices + 1)
        for combo in combinations_with_replacement(names, size)
        if table.layout(combo) is not None
    ]
    assert len(sets) == EXAMPLES["enumeration_check"][key]["distinct_multisets"]
    most = max(sum(table.profile(name).compute_slices for name in combo) for combo in sets if combo)  # type: ignore[union-attr]
    assert most == EXAMPLES["enumeration_check"][key]["max_compute_slices"]


def test_charges_of_a_card_never_pass_1000() -> None:
    for table in geometries():
        for names in table.layouts():
            assert sum(table.charge(name) for name in names) <= 1000


def test_spans_scale_and_do_not_overlap() -> None:
    table = geometry("A100-40GB")
    assert table is not None
    assert table.span(0, 4) == (0, 500)
    assert table.span(4, 4) == (500, 1000)
    assert [table.span(n, 1) for n in range(3)] == [(0, 125), (125, 250), (250, 375)]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("Tesla T4", None),
    ],
)
def test_product_names(name: str, key: str | None) -> None:
    table = geometry_for_product(name)
    assert (table and table.key) == key
