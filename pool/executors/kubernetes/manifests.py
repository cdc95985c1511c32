"""Manifests: pods, their service, claims, namespaces, quotas.

Pure: from a ``PodOrder`` to what the API is sent. Whatever came from people sits in exactly one field as data (see
`names`); all names are made here. Pods never run as root unless the cluster's settings say so, get no token of the
cluster, no capability, no host namespace, and no volume but those of the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from pool.executors.kubernetes import names
from pool.executors.kubernetes.devices import Devices, claim_body
from pool.executors.kubernetes.nodes import GPU
from pool.executors.kubernetes.options import Options, Volume

CONTAINER = "work"
MASTER_PORT = 29500
HOLD_COMMAND = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"
NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""CUDA images ask for all devices by themselves: a pod that was given none must see none."""
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT"})
KILL_SLACK_S = 5


@dataclass(frozen=True)
class PodOrder:
    """One member. ``command`` empty: the image's own. ``env``: checked variables of its person; ``ours``: what the
    pool tells. ``size`` members in its allocation. ``grace_s``: seconds from the signal to the kill."""

    uid: UUID
    number: int
    size: int
    node: str
    namespace: str
    image: str
    command: str
    devices: Devices
    env: dict[str, str] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    cpu_milli: int = 0
    memory_mib: int = 0
    grace_s: int = 30
    signal: str = "SIGTERM"
    department: str = ""
    holder: str = ""
    reference: str = ""
    options: Options = field(default_factory=Options)

    @property
    def name(self) -> str:
        return names.pod_name(self.uid, self.number)

    @property
    def group(self) -> str:
        return names.group_name(self.uid)


def labels_of(order: PodOrder) -> dict[str, str]:
    """What we find a member's pod by, and what an administrator reads there."""
    return {
        names.MANAGED_BY: names.US,
        names.ALLOCATION: str(order.uid),
        names.MEMBER: str(order.number),
        names.DEPARTMENT: names.label_value(order.department),
        "gpupool.io/holder": names.label_value(order.holder),
        names.REFERENCE: names.label_value(order.reference),
    }


def pod(order: PodOrder) -> dict[str, Any]:
    """The pod of a member, bound by affinity to its node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": order.name,
            "namespace": order.namespace,
            "labels": labels_of(order),
            "annotations": {names.NODE: order.node, **order.devices.annotations},
        },
        "spec": _spec(order),
    }


def service(order: PodOrder) -> dict[str, Any]:
    """The headless service under which the members of a gang find each other, also before they are ready."""
    labels = {name: value for name, value in labels_of(order).items() if name != names.MEMBER}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": order.group, "namespace": order.namespace, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.ALLOCATION: str(order.uid)},
            "ports": [{"name": "rendezvous", "port": MASTER_PORT, "protocol": "TCP"}],
        },
    }


def claim_template(order: PodOrder, version: str) -> dict[str, Any]:
    """What the cluster makes a member's DRA claim from: the claim is the pod's, and goes when the pod has ended."""
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": order.name, "namespace": order.namespace, "labels": labels_of(order)},
        "spec": {"spec": claim_body(order.devices, version)},
    }


def namespace(name: str, department: str, options: Options) -> dict[str, Any]:
    """A department's namespace; pods that break the pod security standard are refused there by the cluster too."""
    loose = options.allow_root or any(one.kind == "nfs" for one in options.volumes)
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": name,
            "labels": {
                names.MANAGED_BY: names.US,
                names.DEPARTMENT: names.label_value(department),
                "pod-security.kubernetes.io/enforce": "baseline" if loose else "restricted",
            },
        },
    }


def quota(namespace_name: str, hard: dict[str, int]) -> dict[str, Any]:
    """The one ResourceQuota that we keep in a department's namespace."""
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpupool", "namespace": namespace_name, "labels": {names.MANAGED_BY: names.US}},
        "spec": {"hard": {name: str(count) for name, count in sorted(hard.items())}},
    }


def rendezvous(order: PodOrder) -> dict[str, str]:
    """Where a gang meets (torchrun's names); nothing for a single member."""
    if order.size < 2:
        return {}
    return {
        "MASTER_ADDR": f"{order.group}-0.{order.group}",
        "MASTER_PORT": str(MASTER_PORT),
        "NODE_RANK": str(order.number),
        "NNODES": str(order.size),
        "NPROC_PER_NODE": str(max(1, order.devices.count)),
    }


def _spec(order: PodOrder) -> dict[str, Any]:
    options = order.options
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(1, order.grace_s),
        "hostname": order.name,
        "securityContext": _pod_security(options),
        "affinity": {"nodeAffinity": _on(order.node)},
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in (GPU, *options.tolerations)
        ],
        "containers": [_container(order)],
        "volumes": _volumes(order),
    }
    if order.size > 1:
        spec["subdomain"] = order.group
    scheduler = order.devices.scheduler or options.scheduler
    if scheduler:
        spec["schedulerName"] = scheduler
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.registry_logins:
        spec["imagePullSecrets"] = [{"name": name} for name in options.registry_logins]
    if order.devices.claims:
        spec["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": order.name}]
    return spec


def _on(node: str) -> dict[str, Any]:
    """Only on this node, by name and not by a label that could be wrong."""
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _pod_security(options: Options) -> dict[str, Any]:
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not options.allow_root:
        context |= {
            "runAsNonRoot": True,
            "runAsUser": options.run_as,
            "runAsGroup": options.run_as,
            "fsGroup": options.run_as,
        }
    return context


def _container(order: PodOrder) -> dict[str, Any]:
    told = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if order.devices.count else dict(NO_DEVICES)
    variables = {**order.env, **told, **order.ours, **rendezvous(order)}
    wanted: dict[str, str] = {name: str(count) for name, count in order.devices.resources.items()}
    if order.cpu_milli:
        wanted["cpu"] = f"{order.cpu_milli}m"
    if order.memory_mib:
        wanted["memory"] = f"{order.memory_mib}Mi"
    resources: dict[str, Any] = {"requests": dict(wanted), "limits": dict(wanted)}
    if order.devices.claims:
        resources["claims"] = [{"name": "gpus"}]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": order.image,
        "env": [{"name": name, "value": names.literal(value)} for name, value in sorted(variables.items())],
        "resources": resources,
        "workingDir": "/work",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "work", "mountPath": "/work"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"site-{one.name}", "mountPath": one.path, "readOnly": one.read_only}
                for one in order.options.volumes
            ),
        ],
    }
    if order.command:
        container["command"] = ["/bin/sh", "-c", names.literal(order.command)]
    if order.signal != "SIGTERM":
        container["lifecycle"] = {"preStop": {"exec": {"command": _signal_first(order)}}}
    return container


def _signal_first(order: PodOrder) -> list[str]:
    """Kubernetes ends containers by SIGTERM alone: the signal that was asked for goes before it, to all processes."""
    if order.signal not in SIGNALS:
        raise names.SpecError(
            "signal_not_possible", f"no signal that work can be told by: {order.signal[:20]!r}"
        )
    word = order.signal.removeprefix("SIG")
    wait = max(1, order.grace_s - KILL_SLACK_S)
    return ["/bin/sh", "-c", f"kill -s {word} 1; kill -s {word} -- -1; sleep {wait}"]


def _volumes(order: PodOrder) -> list[dict[str, Any]]:
    shm: dict[str, Any] = {"medium": "Memory"}
    if order.memory_mib:
        shm["sizeLimit"] = f"{max(64, order.memory_mib // 2)}Mi"
    return [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
        *({"name": f"site-{one.name}", **_source(one)} for one in order.options.volumes),
    ]


def _source(volume: Volume) -> dict[str, Any]:
    if volume.kind == "claim":
        return {"persistentVolumeClaim": {"claimName": volume.source, "readOnly": volume.read_only}}
    server, _, path = volume.source.partition(":")
    return {"nfs": {"server": server, "path": path, "readOnly": volume.read_only}}
