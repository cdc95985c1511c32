"""What node objects say: recorded ones of ../shared/samples, and made ones for what they do not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool.executors.kubernetes.found import as_found
from pool.executors.kubernetes.nodes import (
    SeenNode,
    mig_resource,
    product_name,
    profile_of,
    quantity,
    read_node,
)

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples"
GPU = "nvidia.com/gpu"


def sample(name: str) -> Any:
    return json.loads((SAMPLES / name).read_text(encoding="utf-8"))


def made(
    resources: dict[str, int | str],
    labels: dict[str, str] | None = None,
    capacity: dict[str, int | str] | None = None,
    **parts: Any,
) -> SeenNode:
    node = {
        "metadata": {
            "name": "n1",
            "uid": "u1",
            "labels": labels or {},
            "annotations": parts.pop("annotations", {}),
        },
        "spec": parts.pop("spec", {}),
        "status": {
            "allocatable": {"cpu": "8", "memory": "64Gi", **resources},
            "capacity": {"cpu": "8", "memory": "64Gi", **resources, **(capacity or {})},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    return read_node(node, **parts)


H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127", 127.0),
        ("127500m", 127.5),
        ("1056000000Ki", 1056000000 * 1024.0),
        ("1Gi", 2.0**30),
        ("1e3", 1000.0),
        ("12M", 12e6),
        (8, 8.0),
    ],
)
def test_quantities(text: object, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "1Qi", "-1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        quantity(text)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA-A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA-A100-PCIE-40GB-SHARED", "NVIDIA A100-PCIE-40GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb-SHARED", "NVIDIA A100-SXM4-80GB"),
        ("Tesla-V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("Tesla-T4", "Tesla T4"),
        ("NVIDIA-GeForce-RTX-4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_products_read_as_the_driver_prints_them(label: str, name: str) -> None:
    assert product_name(label) == name


def test_profiles_and_resources_are_each_others_names() -> None:
    assert profile_of("nvidia.com/mig-1g.10gb.me") == "1g.10gb+me"
    assert mig_resource("1g.10gb+me") == "nvidia.com/mig-1g.10gb.me"
    assert profile_of(GPU) == ""


def slots(node: SeenNode) -> list[list[tuple[str, int, int]]]:
    return [[(one.profile, one.start, one.size) for one in card.slices] for card in node.cards or ()]


@pytest.mark.shared
class TestRecorded:
    """Each file's `parser_must` of ../shared/samples/INDEX.json."""

    def test_whole_cards(self) -> None:
        node = read_node(sample("authored/k8s/01_whole_8xA100.json"))
        assert (node.open, node.driver, node.cpu_milli, node.memory_mib) == (
            True,
            "580.95.05",
            127000,
            1025390,
        )
        assert [(card.index, card.name, card.memory_mib) for card in node.cards or ()] == [
            (index, "NVIDIA A100-SXM4-80GB", 81920) for index in range(8)
        ]
        assert {card.uuid for card in node.cards or ()} == {
            f"K8S-c0000000-0000-4000-8000-000000000001-{index}" for index in range(8)
        }

    def test_one_card_of_eight_is_cut(self) -> None:
        """G105, G106: eight cards whatever is cut of them; instances are those that are allocatable."""
        node = read_node(sample("authored/k8s/02_mig_mixed_partial.json"))
        assert len(node.cards or ()) == 8
        assert slots(node)[:7] == [[]] * 7
        assert slots(node)[7] == [("2g.20gb", 0, 2), ("1g.10gb", 2, 1), ("1g.10gb", 3, 1), ("3g.40gb", 4, 4)]

    def test_a_layout_that_the_strategy_refuses(self) -> None:
        node = read_node(sample("authored/k8s/04_mig_invalid.json"))
        assert (node.cards, node.reason, node.notes[0][0]) == (None, "mig_invalid", "mig_invalid")

    def test_a_layout_being_changed_takes_no_work_and_loses_no_card(self) -> None:
        node = read_node(sample("authored/k8s/05_mig_reconfiguring.json"))
        assert (node.cards, node.reason, node.missing) == (None, "mig_pending", 0)

    @pytest.mark.parametrize("state", ["rebooting", "failed"])
    def test_other_states_of_a_change(self, state: str) -> None:
        """G102: a layout that failed or waits for a reboot takes no work."""
        item = sample("authored/k8s/05_mig_reconfiguring.json")
        item["metadata"]["labels"]["nvidia.com/mig.config.state"] = state
        assert read_node(item).reason == f"mig_{state}"

    def test_time_slices_under_another_name(self) -> None:
        """G085: two cards shared four times, neither eight nor none."""
        node = read_node(sample("authored/k8s/07_time_slicing_renamed.json"))
        assert (node.sharing, node.replicas, len(node.cards or ())) == ("time-slicing", 4, 2)
        assert node.allocatable == {GPU: 0, "nvidia.com/gpu.shared": 8}

    def test_mps_shares_are_no_cards(self) -> None:
        node = read_node(sample("authored/k8s/08_mps.json"))
        assert (node.sharing, node.replicas) == ("mps", 10)
        assert [card.name for card in node.cards or ()] == ["NVIDIA L40S"] * 4

    def test_a_node_that_does_not_answer_keeps_its_cards(self) -> None:
        node = read_node(sample("authored/k8s/10_not_ready.json"))
        assert (node.ready, node.reason, len(node.cards or ())) == (False, "node_not_ready", 8)

    def test_an_ill_card_is_counted(self) -> None:
        """G097, G099: what is there against what is allocatable."""
        node = read_node(sample("authored/k8s/11_one_unhealthy.json"))
        assert (node.missing, node.notes) == (
            1,
            (("gpu_unhealthy", "1 of 8 nvidia.com/gpu are not allocatable"),),
        )

    def test_devices_before_their_plugin(self) -> None:
        node = read_node(sample("authored/k8s/13_labels_before_plugin.json"))
        assert (node.cards, node.reason) == (None, "gpu_operator_not_ready")

    def test_hami_names_its_cards(self) -> None:
        node = read_node(sample("authored/k8s/14_hami.json"))
        assert node.hami
        assert [(card.uuid, card.memory_mib, card.name) for card in node.cards or ()] == [
            ("GPU-a0000001-1111-4222-8333-000000000001", 23028, "NVIDIA A10"),
            ("GPU-a0000002-1111-4222-8333-000000000002", 23028, "NVIDIA A10"),
        ]

    def test_the_usual_taint_of_gpu_nodes_closes_nothing(self) -> None:
        node = read_node(sample("authored/k8s/16_taint_gpu.json"))
        assert (node.open, len(node.cards or ())) == (True, 4)

    def test_dra_devices(self) -> None:
        devices = sample("authored/k8s/20_resourceslice_v1.json")
        bare = {"metadata": {"name": "k-h100-05", "uid": "u"}, "status": {}}
        node = read_node(bare, [devices])
        assert (node.dra, node.driver) == (True, "580.95.5")
        assert [(card.uuid, card.index, card.memory_mib) for card in node.cards or ()] == [
            ("GPU-a0000001-1111-4222-8333-000000000001", 0, 81559),
            ("GPU-a0000002-1111-4222-8333-000000000002", 1, 81920),
        ]
        assert slots(node) == [[], [("1g.10gb", 0, 1)]]
        assert node.notes == (("gpu_tainted", "gpu-1-mig-1g10gb-19-0: gpu.nvidia.com/xid"),)

    def test_dra_devices_of_another_node_or_an_older_generation(self) -> None:
        devices = sample("authored/k8s/20_resourceslice_v1.json")
        old = json.loads(json.dumps(devices))
        old["spec"]["pool"]["generation"] = 2
        old["spec"]["devices"] = [{**old["spec"]["devices"][0], "name": "gpu-7"}]
        bare = {"metadata": {"name": "k-h100-05", "uid": "u"}, "status": {}}
        assert [card.index for card in read_node(bare, [old, devices]).cards or ()] == [0, 1]
        assert read_node({**bare, "metadata": {"name": "x", "uid": "u"}}, [devices]).cards == ()

    def test_dra_devices_of_the_first_beta(self) -> None:
        devices = sample("authored/k8s/20_resourceslice_v1.json")
        for device in devices["spec"]["devices"]:
            device["basic"] = {
                name: device.pop(name) for name in ("attributes", "capacity", "taints") if name in device
            }
        bare = {"metadata": {"name": "k-h100-05", "uid": "u"}, "status": {}}
        assert [card.memory_mib for card in read_node(bare, [devices]).cards or ()] == [81559, 81920]

    def test_a_lost_card_is_not_there(self) -> None:
        devices = sample("authored/k8s/20_resourceslice_v1.json")
        devices["spec"]["devices"][0]["taints"] = [{"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule"}]
        bare = {"metadata": {"name": "k-h100-05", "uid": "u"}, "status": {}}
        assert [card.index for card in read_node(bare, [devices]).cards or ()] == [1]

    def test_a_real_node_with_a_resource_that_went_away(self) -> None:
        node = read_node(sample("real/k8s_node_a100_mig_mixed.json"))
        assert slots(node) == [[("2g.10gb", 0, 2), ("1g.5gb", 2, 1), ("1g.5gb", 3, 1), ("1g.5gb", 4, 1)]]
        assert (node.driver, node.cuda) == ("520.56.06", "11.8")


def test_all_cards_cut_alike_under_the_single_strategy() -> None:
    labels = {**A100, "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.memory": "9728"}
    labels["nvidia.com/gpu.product"] = "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"
    node = made({GPU: 14}, labels)
    assert [(card.memory_mib, len(card.slices)) for card in node.cards or ()] == [(81920, 7), (81920, 7)]


def test_instances_that_do_not_divide_lie_largest_first() -> None:
    labels = {**A100, "nvidia.com/mig.strategy": "mixed", "nvidia.com/gpu.count": "2"}
    node = made({GPU: 0, "nvidia.com/mig-3g.40gb": 3, "nvidia.com/mig-1g.10gb": 1}, labels)
    assert slots(node) == [[("3g.40gb", 0, 4), ("3g.40gb", 4, 4)], [("3g.40gb", 0, 4), ("1g.10gb", 4, 1)]]


def test_more_instances_than_cards_can_carry_are_not_guessed() -> None:
    labels = {**A100, "nvidia.com/mig.strategy": "mixed", "nvidia.com/gpu.count": "1"}
    node = made({GPU: 0, "nvidia.com/mig-7g.80gb": 2}, labels)
    assert (node.cards, node.notes[0][0]) == (None, "mig_layout_unknown")


@pytest.mark.parametrize(
    "text",
    [
        "GPU-1,10,23028,100,NVIDIA-NVIDIA A10,0,true,3,hami-core:",
        '[{"id":"GPU-1","index":3,"count":10,"devmem":23028,"type":"NVIDIA-NVIDIA A10","health":true},'
        '{"id":"GPU-2","index":4,"devmem":23028,"type":"NVIDIA A10"}]',
    ],
)
def test_hami_registers_of_later_releases(text: str) -> None:
    node = made({GPU: 10}, annotations={"hami.io/node-nvidia-register": text})
    assert [(card.uuid, card.index, card.name) for card in node.cards or ()] == [("GPU-1", 3, "NVIDIA A10")]


def test_a_register_that_cannot_be_read_is_no_empty_node() -> None:
    node = made({GPU: 10}, annotations={"hami.io/node-nvidia-register": "[what"})
    assert (node.cards, node.notes) == (None, (("hami_register_unreadable", "[what"),))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"unschedulable": True}, "cordoned_there"),
        ({"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}, "taint:maintenance"),
        ({"taints": [{"key": "maintenance", "effect": "PreferNoSchedule"}]}, ""),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, ""),
        ({"taints": [{"key": "gpupool.io/cordoned", "effect": "NoSchedule"}]}, ""),
    ],
)
def test_who_closed_it(spec: dict[str, Any], reason: str) -> None:
    assert made({GPU: 1}, H100, spec=spec, tolerations=("team",)).reason == reason


def test_a_node_without_cards_has_none() -> None:
    assert made({}).cards == ()


@pytest.mark.django_db
def test_ill_cards_are_left_out_from_the_top_and_never_held_ones() -> None:
    node = made({GPU: 2}, H100, capacity={GPU: 4})
    (found,) = as_found([node])
    assert [one["index"] for one in found.gpus or ()] == [0, 1]


def test_our_own_cordon_is_told_apart_from_others() -> None:
    taint = {"taints": [{"key": "gpupool.io/cordoned", "effect": "NoSchedule"}]}
    node = made({GPU: 1}, H100, spec=taint, annotations={"gpupool.io/cordoned": "gpupool: new memory"})
    (found,) = as_found([node])
    assert (found.open, found.reason) == (False, "gpupool: new memory")
    both = made({GPU: 1}, H100, spec={**taint, "unschedulable": True})
    assert as_found([both])[0].reason == "cordoned_there"


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
        {"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
    ],
)
def test_g100_a_driver_upgrade_is_maintenance_and_loses_no_card(labels: dict[str, str]) -> None:
    spec = {"unschedulable": True}
    seen = made({GPU: 0}, {**H100, **labels}, capacity={GPU: 8}, spec=spec)
    assert (seen.reason, seen.cards, seen.missing) == ("driver_upgrade", None, 0)
    (found,) = as_found([seen])
    assert (found.open, found.reason, found.gpus) == (False, "driver_upgrade", None)
    over = {
        "nvidia.com/gpu-driver-upgrade-state": "upgrade-done",
        "nvidia.com/gpu.deploy.device-plugin": "true",
    }
    assert made({GPU: 8}, {**H100, **over}).reason == ""
    assert made({GPU: 8}, {**H100, "nvidia.com/gpu-driver-upgrade-state": "upgrade-required"}).reason == ""


def test_g101_a_layout_is_there_when_its_instances_are_offered() -> None:
    """MIG Manager's `success` alone is not believed."""
    labels = {**A100, "nvidia.com/mig.config": "all-1g.10gb", "nvidia.com/mig.config.state": "success"}
    bare = made({GPU: 2}, labels)
    assert [code for code, _detail in bare.notes] == ["mig_not_there"]
    assert [card.slices for card in bare.cards or ()] == [(), ()]
    cut = made({GPU: 0, "nvidia.com/mig-1g.10gb": 14}, {**labels, "nvidia.com/gpu.count": "2"})
    assert (cut.notes, [len(card.slices) for card in cut.cards or ()]) == ((), [7, 7])
    assert made({GPU: 2}, {**labels, "nvidia.com/mig.config": "all-disabled"}).notes == ()


def test_g107_instances_are_those_that_the_resources_name_whatever_labels_are_missing() -> None:
    node = made({GPU: 0, "nvidia.com/mig-3g.40gb": 2}, A100)
    assert "nvidia.com/mig.strategy" not in node.labels
    assert slots(node) == [[("3g.40gb", 0, 4), ("3g.40gb", 4, 4)]]


def test_g117_a_card_that_hami_calls_ill_is_left_out_until_hami_says_otherwise() -> None:
    """Whoever mends it must have its plugin started anew: nothing here guesses."""
    ill = "GPU-1,10,23028,100,NVIDIA-NVIDIA A10,0,{health}:GPU-2,10,23028,100,NVIDIA-NVIDIA A10,0,true:"
    for health, seen in (("false", ["GPU-2"]), ("true", ["GPU-1", "GPU-2"])):
        node = made({GPU: 20}, annotations={"hami.io/node-nvidia-register": ill.format(health=health)})
        assert [card.uuid for card in node.cards or ()] == seen
        assert [code for code, _detail in node.notes] == ["gpu_unhealthy"] * (2 - len(seen))


def test_g122_cards_that_two_programs_cut_are_told() -> None:
    """MIG Manager's instances beside the DRA driver: told on the cluster's check, as neither knows of the other."""
    devices = sample("authored/k8s/20_resourceslice_v1.json")
    bare = {"metadata": {"name": "k-h100-05", "uid": "u"}, "status": {}}
    labelled = {**bare, "metadata": {**bare["metadata"], "labels": {"nvidia.com/mig.config": "all-1g.10gb"}}}
    told = ("mig_managed_twice", "the DRA driver offers these cards, and MIG Manager has all-1g.10gb")
    assert told in read_node(labelled, [devices]).notes
    assert not any(code == told[0] for code, _ in read_node(bare, [devices]).notes)
