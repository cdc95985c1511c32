"""Manifests: devices, gangs, and everything that people write ending as data in its own field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.executors.kubernetes import manifests, names
from pool.executors.kubernetes.devices import Asked, Devices, claim_body, devices_for
from pool.executors.kubernetes.executor import KubernetesExecutor
from pool.executors.kubernetes.manifests import PodOrder
from pool.executors.kubernetes.names import SpecError
from pool.executors.kubernetes.nodes import Card, SeenNode
from pool.executors.kubernetes.options import Options, options_of
from pool.services.clusters import SECRET_WORDS

UID = UUID("0190b3f2-1c00-7000-8000-000000000001")
GPU = "nvidia.com/gpu"
CARDS = tuple(Card(f"GPU-{index}", index, "NVIDIA H100 80GB HBM3", 81559) for index in range(4))


def node(**values: Any) -> SeenNode:
    return SeenNode(
        **{
            "name": "n1",
            "uid": "u",
            "ready": True,
            "reason": "",
            "cards": CARDS,
            "allocatable": {GPU: 4},
            **values,
        }
    )


def order(**values: Any) -> PodOrder:
    plain: dict[str, Any] = {
        "uid": UID,
        "number": 0,
        "size": 1,
        "node": "n1",
        "namespace": "gpupool-vision",
        "image": "busybox:1.36",
        "command": "python train.py",
        "devices": Devices({GPU: 2}, count=2),
        "department": "vision",
        "holder": "ming",
        "reference": "R-7",
    }
    return PodOrder(**plain | values)


def container(made: dict[str, Any]) -> dict[str, Any]:
    return dict(made["spec"]["containers"][0])


def variables(made: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(made)["env"] if "value" in one}


# -- devices ---------------------------------------------------------------------------------------------------


def refused(asked: Asked, **values: Any) -> str:
    with pytest.raises(SpecError) as error:
        devices_for(node(**values), asked)
    return error.value.code


def test_whole_cards_are_a_number() -> None:
    made = devices_for(node(), Asked(whole=("K8S-u-0", "K8S-u-1")))
    assert (made.resources, made.annotations, made.count) == ({GPU: 2}, {}, 2)
    assert refused(Asked(whole=("a",) * 5)) == "resource_not_offered"


def test_instances_are_resources_of_their_profile_or_of_the_single_strategy() -> None:
    asked = Asked(slices=(("a", "1g.10gb"), ("b", "1g.10gb"), ("c", "2g.20gb+me")))
    mixed = {"nvidia.com/mig-1g.10gb": 2, "nvidia.com/mig-2g.20gb.me": 1}
    assert devices_for(node(allocatable=mixed, mig_strategy="mixed"), asked).resources == mixed
    assert devices_for(node(mig_strategy="single"), asked).resources == {GPU: 3}
    assert refused(asked, allocatable={}, mig_strategy="mixed") == "resource_not_offered"
    assert (
        refused(asked, hami=True) == "mig_not_offered"
    )  # G118: HAMi cuts cards itself, and only a node as a whole


def test_hami_is_told_cards_memory_and_cores() -> None:
    made = devices_for(
        node(hami=True, allocatable={GPU: 40}), Asked(fraction_of=("GPU-1",), milli=305, mib=20000)
    )
    assert made.resources == {GPU: 1, "nvidia.com/gpumem": 20000, "nvidia.com/gpucores": 31}
    assert (made.annotations, made.scheduler) == ({"nvidia.com/use-gpuuuid": "GPU-1"}, "hami-scheduler")
    share = devices_for(node(hami=True, allocatable={GPU: 40}), Asked(fraction_of=("GPU-1",), milli=250))
    assert share.resources["nvidia.com/gpumem"] == 81559 * 250 // 1000
    whole = devices_for(node(hami=True, allocatable={GPU: 40}), Asked(whole=("GPU-1", "GPU-2")))
    assert whole.resources == {GPU: 2, "nvidia.com/gpumem-percentage": 100, "nvidia.com/gpucores": 100}
    assert whole.annotations == {"nvidia.com/use-gpuuuid": "GPU-1,GPU-2"}


def test_hami_never_gets_more_memory_than_a_card_has() -> None:  # behaviours.json G115
    assert refused(Asked(fraction_of=("GPU-1",), milli=100, mib=90000), hami=True) == "fraction_too_large"


def test_shares_of_mps_and_time_slicing_must_be_large_enough() -> None:
    shared: dict[str, Any] = {"sharing": "mps", "replicas": 4, "allocatable": {GPU: 16}}
    asked = Asked(fraction_of=("a",), milli=250, mib=20000)
    assert devices_for(node(**shared), asked).resources == {GPU: 1}
    renamed = shared | {"allocatable": {GPU: 0, "nvidia.com/gpu.shared": 16}}
    assert devices_for(node(**renamed), asked).resources == {"nvidia.com/gpu.shared": 1}
    assert refused(replace(asked, milli=251), **shared) == "fraction_too_large"
    assert refused(replace(asked, mib=20400), **shared) == "fraction_too_large"
    assert refused(asked) == "fraction_not_offered"
    assert refused(Asked(whole=("a",)), **shared) == "whole_cards_not_offered"


def test_claims_name_cards_by_uuid() -> None:
    made = devices_for(node(dra=True), Asked(whole=("GPU-1",), slices=(("MIG-2", "1g.10gb"),)))
    assert (made.resources, made.claims) == ({}, (("gpu.nvidia.com", "GPU-1"), ("mig.nvidia.com", "MIG-2")))
    request = claim_body(made, "v1")["devices"]["requests"][1]
    assert request["exactly"]["deviceClassName"] == "mig.nvidia.com"
    assert request["exactly"]["selectors"] == [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].uuid == 'MIG-2'"}}
    ]
    old = claim_body(made, "v1beta1")["devices"]["requests"][0]
    assert (old["deviceClassName"], old["count"], "exactly" in old) == ("gpu.nvidia.com", 1, False)
    assert refused(Asked(whole=("K8S-u-0",)), dra=True) == "device_unknown"
    assert refused(Asked(whole=("GPU-1' || true || '",)), dra=True) == "device_unknown"
    assert refused(Asked(fraction_of=("GPU-1",), milli=100), dra=True) == "fraction_not_offered"


def test_g121_each_instance_is_claimed_by_its_own_uuid() -> None:
    """So a claim of several cannot be met by devices of another card than the plan chose."""
    slices = (("MIG-a", "4g.40gb"), ("MIG-b", "2g.20gb"), ("MIG-c", "1g.10gb"))
    made = devices_for(node(dra=True), Asked(slices=slices))
    requests = claim_body(made, "v1")["devices"]["requests"]
    assert [one["exactly"]["selectors"][0]["cel"]["expression"] for one in requests] == [
        f"device.attributes['gpu.nvidia.com'].uuid == '{uuid}'" for uuid, _profile in slices
    ]
    assert [one["exactly"]["count"] for one in requests] == [1, 1, 1]


def test_a_claim_of_a_pod_is_made_from_a_template_of_its_name() -> None:
    asked = order(devices=Devices(claims=(("gpu.nvidia.com", "GPU-1"),), count=1))
    made = manifests.pod(asked)
    assert made["spec"]["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": asked.name}]
    assert container(made)["resources"]["claims"] == [{"name": "gpus"}]
    template = manifests.claim_template(asked, "v1")
    assert (template["metadata"]["name"], template["apiVersion"]) == (asked.name, "resource.k8s.io/v1")
    assert template["spec"]["spec"]["devices"]["requests"][0]["name"] == "gpu-0"


# -- pods ------------------------------------------------------------------------------------------------------


def test_a_pod_goes_to_its_node_with_its_devices_and_nothing_else() -> None:
    made = manifests.pod(order(cpu_milli=4000, memory_mib=2048))
    wanted = {GPU: "2", "cpu": "4000m", "memory": "2048Mi"}
    assert container(made)["resources"] == {"requests": wanted, "limits": wanted}
    terms = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    ]
    assert made["spec"]["restartPolicy"] == "Never"
    assert container(made)["command"] == ["/bin/sh", "-c", "python train.py"]
    assert variables(made) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_pods_are_locked_in() -> None:
    spec = manifests.pod(order())["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10000
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "nodeName"} & set(spec)
    loose = manifests.pod(order(options=Options(allow_root=True)))["spec"]["securityContext"]
    assert loose == {"seccompProfile": {"type": "RuntimeDefault"}}


def test_a_pod_without_devices_sees_none() -> None:
    assert variables(manifests.pod(order(devices=Devices())))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_another_signal_goes_before_the_end() -> None:
    made = container(manifests.pod(order(signal="SIGUSR1", grace_s=60)))
    assert (
        made["lifecycle"]["preStop"]["exec"]["command"][2] == "kill -s USR1 1; kill -s USR1 -- -1; sleep 55"
    )
    assert "lifecycle" not in container(manifests.pod(order()))
    with pytest.raises(SpecError, match="signal_not_possible"):
        manifests.pod(order(signal="TERM; rm -rf /"))


def test_a_gang_meets_at_its_first_member() -> None:
    made = [manifests.pod(order(number=number, size=2, node=f"n{number}")) for number in range(2)]
    group = f"gp-{UID.hex}"
    assert [one["spec"]["hostname"] for one in made] == [f"{group}-0", f"{group}-1"]
    assert {one["spec"]["subdomain"] for one in made} == {group}
    assert variables(made[1]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": f"{group}-0.{group}",
        "MASTER_PORT": "29500",
        "NODE_RANK": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
    }
    service = manifests.service(order(size=2))
    assert service["metadata"]["name"] == group
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {names.ALLOCATION: str(UID)}


def test_volumes_are_the_clusters_alone() -> None:
    options = options_of(
        {
            "volumes": [
                {"name": "data", "kind": "nfs", "source": "nas.example:/export/data", "path": "/data"},
                {"name": "home", "kind": "claim", "source": "home", "path": "/home", "read_only": False},
            ]
        }
    )
    spec = manifests.pod(order(options=options, memory_mib=4096))["spec"]
    assert spec["volumes"] == [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2048Mi"}},
        {"name": "site-data", "nfs": {"server": "nas.example", "path": "/export/data", "readOnly": True}},
        {"name": "site-home", "persistentVolumeClaim": {"claimName": "home", "readOnly": False}},
    ]
    labels = manifests.namespace("gpupool-x", "x", options)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    strict = manifests.namespace("gpupool-x", "x", Options())["metadata"]["labels"]
    assert strict["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    "settings",
    [
        {"unknown": 1},
        {"server": "http://plain.example"},
        {"run_as": 0},
        {"run_as": True},
        {"allow_root": "yes"},
        {"registries": "docker.io"},
        {"namespace_prefix": "Bad_Prefix"},
        {"default_image": "a b"},
        {"volumes": [{"name": "x", "kind": "host_path", "source": "/", "path": "/host"}]},
        {"volumes": [{"name": "x", "kind": "claim", "source": "c", "path": "/work"}]},
        {"volumes": [{"name": "x", "kind": "nfs", "source": "a", "path": "/x"}]},
        {"volumes": [{"name": "x", "kind": "claim", "source": "c", "path": "/x", "hostPath": {"path": "/"}}]},
    ],
)
def test_settings_that_are_wrong_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as error:
        options_of(settings)
    assert error.value.code in ("settings_wrong", "image_not_possible")
    assert list(
        KubernetesExecutor().settings_wrong(settings={"active": True, "run_as": 5, **settings})
    ) == list(settings)


def test_settings_need_no_word_that_means_a_secret() -> None:
    assert [item.name for item in fields(Options) if SECRET_WORDS.search(item.name)] == []


# -- what people write -----------------------------------------------------------------------------------------

ODD = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=200)


def skeleton(value: Any) -> Any:
    """A document without its texts: what may not depend on what people write."""
    if isinstance(value, dict):
        return {name: skeleton(item) for name, item in value.items()}
    if isinstance(value, list):
        return [skeleton(item) for item in value]
    return type(value).__name__


@given(command=ODD.filter(bool), value=ODD, holder=ODD, department=ODD.filter(bool))
def test_texts_stay_texts(command: str, value: str, holder: str, department: str) -> None:
    plain = order(env={"NAME": "x"})
    written = order(
        command=names.command_checked(command),
        env=names.variables_checked({"NAME": value}),
        holder=holder,
        department=department,
    )
    made = json.loads(json.dumps(manifests.pod(written)))
    assert skeleton(made) == skeleton(manifests.pod(plain))
    assert container(made)["command"][2].replace("$$", "$") == command
    assert variables(made)["NAME"].replace("$$", "$") == value
    for label in made["metadata"]["labels"].values():
        assert len(label) <= 63 and names._LABEL.fullmatch(label)


@pytest.mark.parametrize(
    "command", ["echo $(NODE_RANK)", "echo $$", "echo $HOME $(date)", "a\nb: {c}", "'\"`;|&"]
)
def test_a_command_reaches_its_shell_as_it_was_written(command: str) -> None:
    assert container(manifests.pod(order(command=command)))["command"] == [
        "/bin/sh",
        "-c",
        command.replace("$", "$$"),
    ]


@pytest.mark.parametrize("command", ["a\0b", "x" * 70_000])
def test_a_command_that_no_process_can_be_given(command: str) -> None:
    with pytest.raises(SpecError, match="command_not_possible"):
        names.command_checked(command)


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_VISIBLE_DEVICES", "nvidia_visible_devices", "CUDA_VISIBLE_DEVICES", "GPUPOOL_REQUEST"),
        *("CUDA_DISABLE_CONTROL", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_MPS_PIPE_DIRECTORY", "LD_PRELOAD"),
        *("MASTER_ADDR", "NODE_RANK", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
    ],
)
def test_variables_that_would_override_ours(name: str) -> None:
    with pytest.raises(SpecError, match="variable_reserved"):
        names.variables_checked({name: "all"})


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\n", "名", "A" * 300])
def test_names_that_are_no_variable(name: str) -> None:
    with pytest.raises(SpecError, match="variable_not_possible"):
        names.variables_checked({name: "x"})


def test_values_that_no_process_can_have() -> None:
    for value in ("a\0b", "x" * 40_000):
        with pytest.raises(SpecError, match="variable_not_possible"):
            names.variables_checked({"A": value})
    with pytest.raises(SpecError, match="variable_not_possible"):
        names.variables_checked({f"A{number}": "x" for number in range(201)})


@pytest.mark.parametrize(
    "image",
    [
        "busybox",
        "nvcr.io/nvidia/pytorch:25.01-py3",
        "localhost:5000/a/b_c:1",
        "a/b@sha256:" + "0" * 64,
    ],
)
def test_images(image: str) -> None:
    assert names.image_checked(image) == image


@pytest.mark.parametrize(
    "image",
    [
        *(
            "",
            "A b",
            "a:b c",
            "a\n",
            "../etc",
            "a//b",
            "a@sha256:00",
            "Busybox",
            "a:",
            "http://x/y",
            "a;rm",
            "$(x)",
        ),
        *("a" * 300, '{"x":1}', "x: y"),
    ],
)
def test_what_is_no_image(image: str) -> None:
    with pytest.raises(SpecError, match="image_not_possible"):
        names.image_checked(image)


def test_images_from_allowed_registries_alone() -> None:
    allowed = ("nvcr.io/nvidia", "docker.io")
    assert names.image_checked("nvcr.io/nvidia/cuda:12", allowed)
    assert names.image_checked("busybox", allowed)
    assert names.image_checked("library/busybox", allowed)
    for image in ("nvcr.io/other/x", "nvcr.io/nvidia-fake/x", "evil.example/nvcr.io/nvidia/cuda"):
        with pytest.raises(SpecError, match="registry_not_allowed"):
            names.image_checked(image, allowed)


@given(first=ODD, second=ODD)
def test_departments_never_share_a_namespace(first: str, second: str) -> None:
    made = names.namespace_of(first)
    assert len(made) <= 63 and names.re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", made)
    assert (made == names.namespace_of(second)) == (first == second)


def test_a_plain_code_is_its_namespace() -> None:
    assert names.namespace_of("vision") == "gpupool-vision"
    assert names.namespace_of("Vision") != "gpupool-vision"
