"""The Kubernetes section of `start`: a real control plane, a database of its own; the API by hand beside it.

There is no kubelet, so both are timed to the pod being bound to its node. By hand means what ``kubectl create`` does:
one request that makes a pod with the same resources on the same node, then the scheduler. Ours begins with the
allocation's row and goes the scheduler task's whole way.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.native import k8s
from tests.perf._database import fresh_database
from tests.perf.start import Missing, Times


def measure(rounds: int) -> Times:
    """Seconds from the decision to the pod bound, and from the request by hand to the pod bound, in turns."""
    lacks = k8s.lacking()
    if lacks:
        raise Missing(lacks)
    from tests.pool.executors.kubernetes_plane import Plane

    with tempfile.TemporaryDirectory(prefix="gpupool-perf-k8s-") as folder, fresh_database():
        plane = Plane(Path(folder))
        try:
            plane.start()
            return _measured(plane, rounds)
        finally:
            plane.stop()


def _measured(plane: Any, rounds: int) -> Times:
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    from tests.pool.executors.kubernetes_kubelet import Kubelet
    from tests.pool.executors.kubernetes_rig import KubernetesRig, administrator

    kubelet = Kubelet(plane, administrator(plane))
    ours: list[float] = []
    bare: list[float] = []
    try:
        with KubernetesRig(plane, kubelet, cards=(2 * rounds + 8,)) as rig:
            for turn in range(rounds + 2):
                took = _ours(rig), _bare(rig, turn)
                if turn >= 2:  # the first ones pay for imports, connections and the namespace
                    ours.append(took[0])
                    bare.append(took[1])
    finally:
        kubelet.close()
    return Times(ours, bare)


def _ours(rig: Any) -> float:
    from pool.executors.kubernetes import names

    member = rig.member()
    began = time.perf_counter()
    assert rig.start(member)
    _until_bound(rig, rig.namespace, names.pod_name(member.allocation.uid, member.number))
    return time.perf_counter() - began


def _bare(rig: Any, turn: int) -> float:
    from tests.pool.executors.kubernetes_rig import GPU

    amount = {GPU: "1", "cpu": "100m"}
    name = f"bare-{turn}"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": rig.nodes[0]},
            "containers": [
                {"name": "work", "image": "busybox", "resources": {"limits": amount, "requests": amount}}
            ],
        },
    }
    began = time.perf_counter()
    rig.api.create("/api/v1/namespaces/default/pods", body)
    _until_bound(rig, "default", name)
    return time.perf_counter() - began


def _until_bound(rig: Any, namespace: str, name: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    until = time.monotonic() + 60
    while not rig.api.get(path)["spec"].get("nodeName"):
        if time.monotonic() > until:
            raise TimeoutError(f"{name} was not bound")
        time.sleep(0.001)
