"""Traps of what Kubernetes and Slurm tell of GPUs (facts/pitfalls.json), each by its id."""

from __future__ import annotations

import json

from pool.executors.kubernetes.nodes import read_node
from pool.executors.slurm import read, text
from tests.samples import needs_real, real


@needs_real
def test_p30_a_resource_that_is_gone_stays_in_capacity_and_is_no_card() -> None:
    node = json.loads(real("k8s_node_a100_mig_mixed.json"))
    capacity = node["status"]["capacity"]
    assert (capacity["nvidia.com/mig-3g.20gb"], node["status"]["allocatable"]["nvidia.com/mig-3g.20gb"]) == (
        "1",
        "0",
    )
    seen = read_node(node)
    assert seen.cards is not None and len(seen.cards) == 1
    profiles = sorted(part.profile for part in seen.cards[0].slices)
    assert profiles == ["1g.5gb", "1g.5gb", "1g.5gb", "2g.10gb"]


def test_p35_slurm_tells_no_use_of_mig_instances() -> None:
    """What is held of an instance is a count; its activity comes from DCGM alone."""
    (kind,) = read.gres("gpu:a100_3g.20gb:2(IDX:0-1)")
    assert (kind.name, kind.type, kind.count, kind.indexes) == ("gpu", "a100_3g.20gb", 2, (0, 1))


def test_p36_a_type_that_is_not_told_and_a_use_that_is_not_told() -> None:
    (kind,) = read.gres("gpu:(null):3(IDX:0-1,3)")
    assert (kind.type, kind.count, kind.indexes) == ("", 3, (0, 1, 3))
    without = text.nodes_text("NodeName=n1 State=IDLE CPUTot=8 RealMemory=1000 Gres=gpu:a100:4\n")[0]
    assert without.used == () and without.gres[0].count == 4
