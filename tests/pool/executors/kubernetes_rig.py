"""A Kubernetes cluster for one test: nodes of its own, a department of its own, and the hands to break things.

All tests share one control plane; names are new in each, so nothing has to be cleaned between them but nodes.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import urllib3

from pool.executors import base
from pool.executors.kubernetes import connection, names
from pool.executors.kubernetes.connection import Access, Connection, Problem, access_of
from pool.executors.kubernetes.executor import KubernetesExecutor
from pool.models import AllocationMember, Cluster
from pool.services.capacity import capacity_refresh
from pool.services.credentials import credential_set
from pool.services.outside_nodes import nodes_import
from portal.ops.actor import system
from tests.pool import builders
from tests.pool.executors.conformance import Rig
from tests.pool.executors.kubernetes_kubelet import Kubelet
from tests.pool.executors.kubernetes_plane import ADMIN_TOKEN, Plane
from tests.pool.executors.place import only_member, reserved
from tests.quotas import build

GPU = "nvidia.com/gpu"
LABELS = {
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.sharing-strategy": "none",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/cuda.driver-version.full": "580.95.05",
}
ADMIN = system("test")
_n = itertools.count(1)


def administrator(plane: Plane) -> Connection:
    """A connection that may do everything."""
    return Connection(Access(server=plane.server, ca=plane.authority.pem, token=ADMIN_TOKEN))


class Forwarder:
    """A way to the API server that can be cut (nobody answers at its port) or made slow (answers wait ``delay_s``)."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._to = port
        self._ways: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.open()

    def open(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Nobody listens, and what was open breaks."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
        for way in self._ways:
            _shut(way)
        self._ways.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to), timeout=5)
            except OSError:
                return
            far.settimeout(None)
            self._ways += [near, far]
            for source, sink, wait in ((near, far, lambda: 0.0), (far, near, lambda: self.delay_s)):
                threading.Thread(target=_copy, args=(source, sink, wait), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, wait: Callable[[], float]) -> None:
    try:
        while data := source.recv(65536):
            time.sleep(wait())
            sink.sendall(data)
    except OSError:
        pass
    _shut(source)
    _shut(sink)


def _shut(way: socket.socket) -> None:
    try:
        way.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    way.close()


class KubernetesRig(Rig):
    """See `Rig`; ``nodes`` are {name: cards}."""

    deadline_s = 240.0

    def __init__(
        self,
        plane: Plane,
        kubelet: Kubelet,
        cards: tuple[int, ...] = (2,),
        token: str = ADMIN_TOKEN,
        **settings: Any,
    ) -> None:
        number = next(_n)
        self.plane, self.kubelet, self.api = plane, kubelet, kubelet.api
        self.way = Forwarder(plane.port)
        self.executor = KubernetesExecutor()
        self.team = build.department(f"team{number}-{int(time.time() * 1000) % 10**8}")
        self.cluster: Cluster = builders.cluster(
            f"k8s{number}", executor="kubernetes", settings={"default_image": "busybox:1.36", **settings}
        )
        self.credential(token)
        self.nodes = [f"gpu{number}-{index}-{self.team.code}" for index in range(len(cards))]
        for name, count in zip(self.nodes, cards, strict=True):
            kubelet.node(name, {GPU: count} if count else {}, LABELS)
        found = [one for one in self.executor.discover(cluster=self.cluster) if one.name in self.nodes]
        nodes_import(acting_user=ADMIN, cluster=self.cluster, found=found)
        capacity_refresh()
        card = self.cluster.nodes.get(name=self.nodes[0]).gpus.first()
        self.flavour = card.flavour if card is not None else None
        if self.flavour is not None:
            build.limits(self.team, self.flavour, sum(cards))

    def credential(self, token: str) -> None:
        """The cluster's kubeconfig, by way of the forwarder."""
        text = self.plane.kubeconfig(token, self.way.port)
        credential_set(acting_user=ADMIN, cluster=self.cluster, name="kubeconfig", value=text)

    @property
    def namespace(self) -> str:
        return names.namespace_of(self.team.code)

    @property
    def session(self) -> Any:
        """What the executor keeps of this cluster."""
        return self.executor._session(self.cluster)

    def member(self, command: str = "sleep 600", gpus: int = 1, **values: Any) -> AllocationMember:
        return only_member(reserved(self.team, self.flavour, gpus, command=command, **values))

    def pods(self, member: AllocationMember) -> list[dict[str, Any]]:
        """The member's pods, asked past the executor."""
        selector = f"{names.ALLOCATION}={member.allocation.uid},{names.MEMBER}={member.number}"
        return list(self.api.get("/api/v1/pods", labelSelector=selector)["items"])

    def pod(self, member: AllocationMember) -> dict[str, Any]:
        return self.pods(member)[0]

    def copies(self, member: AllocationMember) -> int:
        return sum(one["status"]["phase"] not in ("Succeeded", "Failed") for one in self.pods(member))

    def finish(self, member: AllocationMember, code: int = 0) -> None:
        self.kubelet.finish(self.pod(member)["metadata"]["uid"], code)

    def lose_answer(self) -> None:
        """The request to make the pod arrives and is done; then the connection breaks."""
        manager = self.session.connection._client.rest_client.pool_manager
        request = manager.request

        def broken(method: str, url: str, **more: Any) -> Any:
            answer = request(method, url, **more)
            if method == "POST" and url.endswith("/pods"):
                answer.read()
                manager.request = request
                raise urllib3.exceptions.ProtocolError("Connection aborted.")
            return answer

        manager.request = broken

    def refuse(self) -> None:
        """The namespace takes no container with more than a little memory."""
        with patch.object(self.session, "_namespaces", set()):
            self.session.namespace_ensure(self.namespace, self.team.code)
        body = {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small", "namespace": self.namespace},
            "spec": {"limits": [{"type": "Container", "max": {"memory": "1Mi"}}]},
        }
        try:
            self.api.create(f"/api/v1/namespaces/{self.namespace}/limitranges", body)
        except Problem as problem:
            assert problem.code == 409

    def away(self) -> None:
        self.way.cut()

    def back(self) -> None:
        self.way.open()

    def slow(self) -> None:
        """Answers come three times later than anybody here waits."""
        self._patience = patch.multiple(connection, READ_S=1.0)
        self._patience.start()
        self.way.delay_s = 3.0

    def fast(self) -> None:
        self.way.delay_s = 0.0
        self._patience.stop()

    def restart(self) -> None:
        self.plane.kill_api()
        self.plane.start_api()
        self.plane.start_others()

    def forget(self, member: AllocationMember) -> None:
        meta = self.pod(member)["metadata"]
        self.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", 0)

    def drive(self) -> None:
        self.kubelet.step()

    def __enter__(self) -> KubernetesRig:
        self._patch = patch.dict(base._made, {"kubernetes": self.executor})
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Its nodes and pods go, and the way to them."""
        self._patch.stop()
        for name in self.nodes:
            self.kubelet.nodes.discard(name)
            self.api.delete(f"/api/v1/nodes/{name}")
        try:
            self.api._json(
                "DELETE", f"/api/v1/namespaces/{self.namespace}/pods", {}, {"gracePeriodSeconds": 0}
            )
        except Problem as problem:
            assert problem.code == 404
        self.kubelet.clear()
        self.way.cut()


def wait_for(holds: Callable[[], bool], seconds: float = 240.0) -> None:
    """Until it holds, or the test fails."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold in time"
        time.sleep(0.05)


def inline(plane: Plane, token: str) -> Access:
    """What the executor reads from a kubeconfig of this control plane."""
    return access_of(plane.kubeconfig(token))
