"""Flavours from the catalogue, and what exists of them."""

from __future__ import annotations

import pytest

from portal.kernel.errors import Invalid
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import FlavourCapacity, GpuFlavour
from quotas.selectors.catalogue import catalogue_match, catalogue_rows, mig_table
from quotas.services.capacity import capacity_write
from quotas.services.flavours import flavour_ensure
from tests.quotas import build

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("name", "mib", "code"),
    [
        ("NVIDIA H800", 81559, "h800-80gb"),
        ("NVIDIA-H800", 81559, "h800-80gb"),
        ("h800", 81559, "h800-80gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("A100-SXM4-40GB", 40536, "a100-40gb"),
        ("a100", 81920, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-sxm2-32gb"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 81920, "a100-80gb"),
        ("NVIDIA L40S-SHARED", 46068, "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090", 49140, "rtx-4090-24gb-48gb"),
        ("NVIDIA H20", 97871, "h20-96gb"),
        ("T4", 0, "t4-16gb"),
        ("Some Other Card", 12288, "some-other-card-12gb"),
        ("未来卡", 0, "gpu"),
    ],
)
def test_a_card_finds_its_flavour(name, mib, code):
    made = flavour_ensure(model_name=name, memory_mib=mib)
    assert made.code == code
    assert flavour_ensure(model_name=name, memory_mib=mib).pk == made.pk
    assert GpuFlavour.objects.count() == 1
    assert AuditEvent.objects.filter(action="flavour.created").count() == 1


def test_facts_are_copied_when_it_is_made():
    made = flavour_ensure(model_name="NVIDIA A100-SXM4-80GB", memory_mib=81920)
    assert (made.name, made.memory_mib, made.architecture) == ("A100 80GB", 81920, "Ampere")
    assert (made.mig_capable, made.compute_slices, made.memory_slices, made.nvlink, made.fp8) == (
        True,
        7,
        8,
        True,
        False,
    )
    table = mig_table(made.mig_table)
    assert table.get("3g.40gb").compute_slices == 3
    assert table.get("9g") is None


def test_every_row_of_the_catalogue_finds_itself_by_every_name():
    for row in catalogue_rows():
        for name in row["nvml_names"]:
            assert catalogue_match(name, row["memory_gb"] * 1024)["key"] == row["key"], name
        assert not row["mig_table"] or mig_table(row["mig_table"]) is not None


@pytest.mark.parametrize(("name", "mib"), [("", 1), ("  ", 1), ("H800", -1)])
def test_nonsense_is_refused(name, mib):
    with pytest.raises(Invalid):
        flavour_ensure(model_name=name, memory_mib=mib)


def test_capacity_is_written_once_and_told():
    flavour = build.flavour(installed=None)
    args = {
        "flavour_id": flavour.pk,
        "installed_milli": 192_000,
        "healthy_milli": 181_000,
        "largest_node_gpus": 8,
    }
    capacity_write(**args)
    capacity_write(**args)
    row = FlavourCapacity.objects.get()
    assert (row.installed_milli, row.healthy_milli, row.largest_node_gpus) == (192_000, 181_000, 8)
    assert OutboxEvent.objects.filter(topic="quotas.limits_changed").count() == 1
    with pytest.raises(Invalid):
        capacity_write(**{**args, "healthy_milli": 193_000})
    with pytest.raises(Invalid):
        capacity_write(**{**args, "healthy_milli": -1})
