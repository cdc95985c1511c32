"""How a node is wired, from what its agent and the kernel say to what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitoring.selectors.topology import topology_of
from pool.agent import readings
from pool.models import Gpu
from pool.services.inventory_report import inventory_sync
from tests.monitoring import builders as b


def test_the_numa_node_of_a_card_is_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "PCI_DEVICES", str(tmp_path))
    for bus, said in (("0000:1b:00.0", "1\n"), ("0001:af:00.0", "-1\n"), ("0000:3d:00.0", "what\n")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(said)
    assert readings.numa_of("00000000:1B:00.0") == 1
    assert readings.numa_of("00000001:AF:00.0") is None, "the kernel knows none"
    assert readings.numa_of("00000000:3D:00.0") is None
    assert readings.numa_of("0000:99:00.0") is None, "no such device"
    assert readings.numa_of("../../etc/passwd") is None and readings.numa_of(None) is None


@pytest.mark.django_db
def test_a_node_is_drawn_by_numa_halves_with_the_link_of_each_pair() -> None:
    node = b.node("topo-01", 0)
    uuids = [f"GPU-topo-{n}" for n in range(4)]
    reports = [
        {
            "uuid": uuid,
            "index": n,
            "name": "NVIDIA A100-SXM4-80GB",
            "memory_mib": 81920,
            "pcie": {"gen": 4, "width": 16},
            "nvlink": {"links": 12, "peers": [uuids[n ^ 1]]},
            "numa": (1, 1, 0, None)[n],
        }
        for n, uuid in enumerate(uuids)
    ]
    inventory_sync(node=node, gpus=reports, nvml_ok=True)
    drawn = topology_of(node)
    assert [(half.number, [gpu.index for gpu in half.gpus]) for half in drawn.halves] == [
        (0, [2]),
        (1, [0, 1]),
        (None, [3]),
    ]
    assert [words for _, words in drawn.pairs] == [
        ["\u2013", "NV12", "SYS", "?"],
        ["NV12", "\u2013", "SYS", "?"],
        ["SYS", "SYS", "\u2013", "NV12"],
        ["?", "?", "NV12", "\u2013"],
    ]
    # What is no NUMA node changes nothing; a card that moved to the other socket does
    for said, kept in (("1", 1), (-1, 1), (70_000, 1), (0, 0)):
        inventory_sync(node=node, gpus=[reports[0] | {"numa": said}, *reports[1:]], nvml_ok=True)
        assert Gpu.objects.get(uuid=uuids[0]).numa_node == kept
