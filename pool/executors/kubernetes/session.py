"""What this process keeps of a cluster between two calls: its connection, the view of its pods, which namespaces are
there. All of it can be lost; a new credential or another setting makes a new one.
"""

from __future__ import annotations

import time
from typing import Any

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.kubernetes import manifests, names
from pool.executors.kubernetes.connection import Access, Connection, Problem, access_of, expires_at
from pool.executors.kubernetes.logs import LogReader
from pool.executors.kubernetes.nodes import SeenNode, read_node
from pool.executors.kubernetes.options import Options, options_of
from pool.executors.kubernetes.view import PodView
from pool.models import Cluster, ClusterCredential
from pool.services.credentials import credential_read
from portal.kernel.clock import now

DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")
NODES = "/api/v1/nodes"
LEARN_AGAIN_S = 600.0
FORBIDDEN = 403
NOT_FOUND = 404


def failure(problem: Problem, doing: str) -> RetryableFailure | TerminalFailure:
    """An answer that says no, as one of the two failures: what people over there can mend may be tried again, what the
    order itself says wrong never."""
    text = f"{doing}: {problem.message}"[:1000]
    said = problem.message.lower()
    if problem.code == FORBIDDEN:
        if "exceeded quota" in said:
            return RetryableFailure("quota_there", text)
        if "NamespaceTerminating" in problem.causes or "being terminated" in said:
            return RetryableFailure("namespace_ending", text)
        if "cannot" in said and "user" in said:
            return RetryableFailure("rights_missing", text)
        return TerminalFailure("refused_there", text)
    if problem.code in (400, 405, 413, 415, 422):
        return TerminalFailure("refused_there", text)
    if problem.code == NOT_FOUND:
        return RetryableFailure("not_found_there", text)
    return RetryableFailure("not_done_there", text)


class Session:
    """One cluster, as this process talks to it."""

    def __init__(self, options: Options, access: Access, mark: str) -> None:
        self.options = options
        self.mark = mark
        self.connection = Connection(access)
        self.expires_at = expires_at(access)
        self.view = PodView()
        self.logs = LogReader()
        self.eviction = "policy/v1"
        self._namespaces: set[str] = set()
        self._dra: str | None = None
        self._dra_at = float("-inf")

    # -- what the cluster is -----------------------------------------------------------------------------------

    def version(self) -> str:
        """The server's version, as it says (``v1.20.2``)."""
        return str(self.connection.get("/version").get("gitVersion") or "")

    def dra(self) -> str:
        """The version of ``resource.k8s.io`` that the cluster serves and we speak; empty where it has none."""
        if self._dra is None or time.monotonic() - self._dra_at > LEARN_AGAIN_S:
            try:
                group = self.connection.get("/apis/resource.k8s.io")
            except Problem as problem:
                if problem.code not in (FORBIDDEN, NOT_FOUND):
                    raise failure(problem, "API groups") from problem
                group = {}
            served = {str(one.get("version")) for one in group.get("versions") or []}
            self._dra = next((one for one in DRA_VERSIONS if one in served), "")
            self._dra_at = time.monotonic()
        return self._dra

    def device_slices(self, node: str = "") -> list[dict[str, Any]]:
        """DRA's ``ResourceSlice`` objects, of one node or all; none where the cluster has no DRA."""
        version = self.dra()
        if not version:
            return []
        query = {"fieldSelector": f"spec.nodeName={node}"} if node else {}
        try:
            return list(
                self.connection.get(f"/apis/resource.k8s.io/{version}/resourceslices", **query).get("items")
                or []
            )
        except Problem as problem:
            if problem.code in (FORBIDDEN, NOT_FOUND):
                return []
            raise failure(problem, "resource slices") from problem

    def node(self, name: str) -> SeenNode:
        """A node as it is now. `node_unknown` (retryable) where the cluster has none of this name."""
        try:
            found = self.connection.get(f"{NODES}/{name}")
        except Problem as problem:
            if problem.code == NOT_FOUND:
                raise RetryableFailure("node_unknown", f"the cluster has no node {name}") from problem
            raise failure(problem, f"node {name}") from problem
        return self.read(found, self.device_slices(name))

    def nodes(self) -> list[SeenNode]:
        """All nodes as they are now."""
        slices = self.device_slices()
        by_node: dict[str, list[dict[str, Any]]] = {}
        for one in slices:
            by_node.setdefault(str((one.get("spec") or {}).get("nodeName")), []).append(one)
        try:
            rows = self.connection.get(NODES).get("items") or []
        except Problem as problem:
            raise failure(problem, "nodes") from problem
        return [self.read(row, by_node.get(str(row["metadata"]["name"]), [])) for row in rows]

    def read(self, node: dict[str, Any], slices: list[dict[str, Any]]) -> SeenNode:
        """A node object with this cluster's tolerations."""
        return read_node(node, slices, tolerations=self.options.tolerations)

    # -- namespaces ----------------------------------------------------------------------------------------------

    def namespace_ensure(self, name: str, department: str) -> None:
        """The department's namespace, made where it is missing and we may. `namespace_not_ours` (terminal) where one
        of this name belongs to somebody else."""
        if name in self._namespaces:
            return
        try:
            try:
                found = self.connection.get(f"/api/v1/namespaces/{name}")
            except Problem as problem:
                if problem.code != NOT_FOUND:
                    raise
                if not self.options.create_namespaces:
                    raise RetryableFailure(
                        "namespace_missing", f"an administrator of the cluster must make {name}"
                    ) from problem
                found = self._namespace_make(name, department)
        except Problem as problem:
            raise failure(problem, f"namespace {name}") from problem
        labels = found["metadata"].get("labels") or {}
        if labels.get(names.MANAGED_BY) != names.US or (
            labels.get(names.DEPARTMENT) != names.label_value(department)
        ):
            raise TerminalFailure("namespace_not_ours", f"{name} is there and is not this department's")
        if (found.get("status") or {}).get("phase") == "Terminating":
            raise RetryableFailure("namespace_ending", f"{name} is being removed over there")
        self._namespaces.add(name)

    def _namespace_make(self, name: str, department: str) -> dict[str, Any]:
        body = manifests.namespace(name, department, self.options)
        try:
            return self.connection.create("/api/v1/namespaces", body)
        except Problem as problem:
            if problem.code != 409:
                raise
        return self.connection.get(f"/api/v1/namespaces/{name}")

    def namespace_forget(self, name: str) -> None:
        """It turned out not to be there (any more): look again the next time."""
        self._namespaces.discard(name)


class Sessions:
    """The sessions of this process, by cluster."""

    def __init__(self) -> None:
        self._kept: dict[int, Session] = {}

    def of(self, cluster: Cluster) -> Session:
        """The session of a cluster, a new one where its settings or credentials are others by now.

        `settings_wrong`, `credential_refused` (terminal) and `credential_missing`, `credential_expired` (retryable:
        an administrator mends it).
        """
        rows = ClusterCredential.objects.filter(cluster_id=cluster.pk).order_by("name")
        marks = [f"{name}@{at.isoformat()}" for name, at in rows.values_list("name", "set_at")]
        mark = repr((sorted(cluster.settings.items()), marks))
        kept = self._kept.get(cluster.pk)
        if kept is None or kept.mark != mark:
            options = options_of(cluster.settings)
            made = Session(options, _access(cluster, options), mark)
            if kept is not None:
                kept.connection.close()
            self._kept[cluster.pk] = kept = made
        if kept.expires_at is not None and kept.expires_at <= now():
            raise RetryableFailure(
                "credential_expired", f"the credential ended on {kept.expires_at:%Y-%m-%d %H:%M} UTC"
            )
        return kept

    def forget(self, cluster: Cluster) -> None:
        """Begin anew with the next call."""
        kept = self._kept.pop(cluster.pk, None)
        if kept is not None:
            kept.connection.close()


def _access(cluster: Cluster, options: Options) -> Access:
    kubeconfig = credential_read(cluster=cluster, name="kubeconfig")
    if kubeconfig:
        return access_of(kubeconfig)
    token = credential_read(cluster=cluster, name="token")
    if not token or not options.server:
        raise RetryableFailure(
            "credential_missing", "a credential `kubeconfig` is needed, or `token` and the setting `server`"
        )
    return Access(server=options.server.rstrip("/"), ca=options.ca, token=token.strip())
