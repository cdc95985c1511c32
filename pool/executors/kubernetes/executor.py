"""`Executor` for Kubernetes clusters: one pod a member, on the node that the plan chose.

Everything is found again by names and labels made from the allocation's uid, so any call may be repeated, by any
process. A pod's name can be taken once: that is what makes a start idempotent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import structlog

from pool.executors.base import (
    ADOPTS,
    CORDONS,
    FRACTIONS,
    HOLDS,
    IMAGES,
    LIMITS,
    MIG,
    OUTPUT,
    POLLED,
    WHOLE,
    CheckResult,
    ExecutorFailure,
    Found,
    Key,
    Limit,
    Look,
    Observation,
    RetryableFailure,
    TerminalFailure,
    Work,
)
from pool.executors.kubernetes import cordons, manifests, names
from pool.executors.kubernetes.checks import findings
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.found import as_found
from pool.executors.kubernetes.limits import compared, pushed
from pool.executors.kubernetes.mig import Layout, layout_of, layout_set
from pool.executors.kubernetes.names import SpecError
from pool.executors.kubernetes.options import problems_of
from pool.executors.kubernetes.session import NOT_FOUND, Session, Sessions, failure
from pool.executors.kubernetes.spec import order_of
from pool.executors.kubernetes.states import departed, is_over, observed, observed_of
from pool.executors.kubernetes.sweeping import sweep
from pool.executors.kubernetes.view import slim
from pool.models import Allocation, AllocationMember, Cluster, Node

log = structlog.get_logger(__name__)
CONFLICT = 409
TOO_MANY = 429
KILL_GRACE_S = 1
"""Never 0: that removes the object before the node has ended the work, and nobody would see it end."""
ASK_ONE_BY_ONE = 20
WANTED = (Allocation.State.RESERVED, Allocation.State.STARTING, Allocation.State.RUNNING)
EVICTIONS = ("policy/v1", "policy/v1beta1")


class KubernetesExecutor:
    """`PolledExecutor` for Kubernetes; see the package's README."""

    kind = "kubernetes"
    can = frozenset({POLLED, WHOLE, FRACTIONS, MIG, HOLDS, IMAGES, OUTPUT, CORDONS, ADOPTS, LIMITS})

    def __init__(self) -> None:
        self._sessions = Sessions()

    def _session(self, cluster: Cluster) -> Session:
        try:
            return self._sessions.of(cluster)
        except SpecError as error:
            raise TerminalFailure(error.code, error.detail) from error

    # -- the cluster ---------------------------------------------------------------------------------------------

    def settings_wrong(self, *, settings: dict[str, Any]) -> dict[str, str]:
        """What is wrong with settings before they are kept, by name."""
        return problems_of(settings)

    def check(self, *, cluster: Cluster) -> CheckResult:
        """Credential, version, rights, nodes; each with its word."""
        try:
            session = self._session(cluster)
        except ExecutorFailure as error:
            return CheckResult([(error.code, False, error.detail)])
        return CheckResult(findings(session))

    def discover(self, *, cluster: Cluster) -> list[Found]:
        """Nodes with NVIDIA devices, and those that are this cluster's in the inventory already."""
        session = self._session(cluster)
        known = set(Node.objects.filter(cluster=cluster).values_list("name", flat=True))
        return as_found([node for node in session.nodes() if node.cards != () or node.name in known])

    def ready(self, *, node: Node) -> bool:
        """Whether its kubelet was heard of, as the last look found."""
        return node.health in (Node.Health.OK, Node.Health.LATE)

    # -- starting ------------------------------------------------------------------------------------------------

    def start(self, *, member: AllocationMember) -> None:
        """As ``start_whole``, of the member's whole allocation here."""
        members = AllocationMember.objects.filter(
            allocation_id=member.allocation_id, node__cluster_id=member.node.cluster_id, given_up_at=None
        ).select_related(
            "node__cluster", "allocation__request", "allocation__holder", "allocation__department"
        )
        self.start_whole(members=list(members.order_by("number")))

    def start_whole(self, *, members: Sequence[AllocationMember]) -> None:
        """Make the pods of an allocation, all or none. Each node is looked at once more before: one that is not ready,
        was closed there or does not offer what the leases promise gets nothing."""
        session = self._session(members[0].node.cluster)
        try:
            orders = [self._order(session, member, len(members)) for member in members]
        except SpecError as error:
            raise TerminalFailure(error.code, error.detail) from error
        first = orders[0]
        session.namespace_ensure(first.namespace, first.department)
        if first.size > 1:
            self._make(session, f"/api/v1/namespaces/{first.namespace}/services", manifests.service(first))
        for order in orders:
            try:
                self._make_pod(session, order)
            except TerminalFailure:
                self._take_back(session, orders)
                raise

    def _order(self, session: Session, member: AllocationMember, size: int) -> manifests.PodOrder:
        node = session.node(member.node.name)
        if not node.open:
            raise RetryableFailure("node_closed", f"{node.name}: {node.reason}")
        return order_of(member, node, session.options, size)

    def _make_pod(self, session: Session, order: manifests.PodOrder) -> None:
        if order.devices.claims:
            version = session.dra()
            path = f"/apis/resource.k8s.io/{version}/namespaces/{order.namespace}/resourceclaimtemplates"
            self._make(session, path, manifests.claim_template(order, version))
        self._make(session, f"/api/v1/namespaces/{order.namespace}/pods", manifests.pod(order))

    def _make(self, session: Session, path: str, body: dict[str, Any]) -> None:
        """Create an object; one of its name that carries the same allocation is the same object. A namespace that
        went meanwhile is made again once."""
        meta = body["metadata"]
        for last in (False, True):
            try:
                session.connection.create(path, body)
                return
            except Problem as problem:
                if problem.code == CONFLICT:
                    self._same(session, f"{path}/{meta['name']}", meta["labels"][names.ALLOCATION])
                    return
                ended = failure(problem, f"{body['kind']} {meta['name']}")
                if problem.code == NOT_FOUND or ended.code == "namespace_ending":
                    session.namespace_forget(meta["namespace"])
                if problem.code != NOT_FOUND or last:
                    raise ended from problem
            session.namespace_ensure(meta["namespace"], meta["labels"][names.DEPARTMENT])

    def _same(self, session: Session, path: str, uid: str) -> None:
        try:
            found = session.connection.get(path)
        except Problem as problem:
            raise failure(problem, path.rsplit("/", 1)[-1]) from problem
        if (found["metadata"].get("labels") or {}).get(names.ALLOCATION) != uid:
            raise TerminalFailure("name_taken", f"{path.rsplit('/', 1)[-1]} is there and is not ours")

    def _take_back(self, session: Session, orders: Iterable[manifests.PodOrder]) -> None:
        for order in orders:
            try:
                path = f"/api/v1/namespaces/{order.namespace}/pods/{order.name}"
                session.connection.delete(path, KILL_GRACE_S)
            except (Problem, ExecutorFailure) as error:  # the sweep finds what is left
                log.warning("pod_not_taken_back", pod=order.name, error=str(error)[:200])

    # -- seeing --------------------------------------------------------------------------------------------------

    def observe(self, *, member: AllocationMember) -> Observation:
        """The member's pod as it is now."""
        return self._ask(self._session(member.node.cluster), member)

    def _ask(self, session: Session, member: AllocationMember) -> Observation:
        try:
            pod = session.connection.get(_path(session, member))
        except Problem as problem:
            if problem.code == NOT_FOUND:
                return _went(session, member)
            raise failure(problem, f"pod of {member}") from problem
        if _key(pod) != (member.allocation.uid, member.number):
            return Observation("unknown")
        return observed_of(pod, _wanted(member))

    def look(self, *, cluster: Cluster, members: Sequence[AllocationMember], nodes: bool) -> Look:
        """From the view of this process, brought up to date. What it does not know is asked for: an order may be
        younger than the last event that arrived."""
        session = self._session(cluster)
        try:
            session.view.refresh(session.connection)
            ours, seen = self._known(session, members)
            absent = [member for key, member in ours.items() if key not in seen]
            if len(absent) > ASK_ONE_BY_ONE:
                session.view.relist(session.connection)
                ours, seen = self._known(session, members)
                absent = [member for key, member in ours.items() if key not in seen]
                seen |= {(one.allocation.uid, one.number): _went(session, one) for one in absent}
            else:
                seen |= {(one.allocation.uid, one.number): self._ask(session, one) for one in absent}
        except Problem as problem:
            raise failure(problem, "pods") from problem
        sweep(session, set(ours))
        return Look(
            members=seen,
            others=_others(session.view.pods.values(), set(ours)),
            nodes=as_found(session.nodes()) if nodes else None,
        )

    def _known(
        self, session: Session, members: Sequence[AllocationMember]
    ) -> tuple[dict[Key, AllocationMember], dict[Key, Observation]]:
        ours: dict[Key, AllocationMember] = {(one.allocation.uid, one.number): one for one in members}
        seen: dict[Key, Observation] = {}
        for pod in session.view.pods.values():
            key = _key(pod)
            if key is not None and key in ours:
                seen[key] = observed_of(pod, _wanted(ours[key]))
        return ours, seen

    def output(self, *, member: AllocationMember, offset: int) -> bytes:
        """What its container wrote, from this byte on."""
        session = self._session(member.node.cluster)
        namespace, name = _where(session, member)
        try:
            return session.logs.read(session.connection, namespace, name, offset)
        except Problem as problem:
            raise failure(problem, f"output of {name}") from problem

    # -- ending --------------------------------------------------------------------------------------------------

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        """Evict the pod with this grace; kill it where there is none, or where somebody's disruption budget would
        keep it. Another signal than SIGTERM was written into the pod when it was made."""
        session = self._session(member.node.cluster)
        namespace, name = _where(session, member)
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            if grace_s <= 0 or signal == "SIGKILL":
                session.connection.delete(path, KILL_GRACE_S)
            elif not self._evict(session, namespace, name, max(KILL_GRACE_S, math.ceil(grace_s))):
                session.connection.delete(path, max(KILL_GRACE_S, math.ceil(grace_s)))
        except Problem as problem:
            if problem.code != NOT_FOUND:
                raise failure(problem, f"stop of {name}") from problem

    def _evict(self, session: Session, namespace: str, name: str, grace_s: int) -> bool:
        """Ask for the eviction, in the newest version that the cluster knows; False where it is not to be had."""
        for version in EVICTIONS[EVICTIONS.index(session.eviction) :]:
            body = {
                "apiVersion": version,
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
                "deleteOptions": {"gracePeriodSeconds": grace_s},
            }
            try:
                session.connection.create(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)
            except Problem as problem:
                if problem.code == NOT_FOUND and "could not find" not in problem.message:
                    return True  # the pod is gone
                if problem.code == TOO_MANY:
                    return False
                if problem.code not in (400, NOT_FOUND, 415, 422):
                    raise
                continue
            session.eviction = version
            return True
        return False

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        """Not by itself: the signal that a checkpoint begins with is part of the stop here."""
        raise TerminalFailure(
            "checkpoint_not_possible", "on Kubernetes the checkpoint's signal goes out with the stop"
        )

    def release(self, *, member: AllocationMember) -> None:
        """See to it that nothing of the member goes on. A pod that ended holds nothing; it stays until its output was
        read and is swept then."""
        session = self._session(member.node.cluster)
        path = _path(session, member)
        try:
            try:
                if not is_over(session.connection.get(path)):
                    session.connection.delete(path, KILL_GRACE_S)
            except Problem as problem:
                if problem.code != NOT_FOUND:
                    raise
            if member.allocation.request.nodes > 1 and member.number == 0:
                namespace, _ = _where(session, member)
                group = names.group_name(member.allocation.uid)
                session.connection.delete(f"/api/v1/namespaces/{namespace}/services/{group}")
        except Problem as problem:
            raise failure(problem, f"release of {member}") from problem

    def end(self, *, cluster: Cluster, external_id: str) -> None:
        """Remove a pod that should not be there."""
        session = self._session(cluster)
        namespace, name = _split(external_id)
        try:
            session.connection.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", KILL_GRACE_S)
        except Problem as problem:
            raise failure(problem, f"end of {external_id}") from problem

    # -- nodes, adoption, limits -----------------------------------------------------------------------------------

    def cordon(self, *, node: Node, reason: str) -> None:
        """By a taint of our own, so that opening it again takes back nothing of others."""
        cordons.close(self._session(node.cluster), node.name, reason)

    def uncordon(self, *, node: Node) -> None:
        """Take our taint away."""
        cordons.open_again(self._session(node.cluster), node.name)

    def adopt(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """Write the allocation's labels on a running pod of somebody; `adopted_already` where it carries another's."""
        session = self._session(cluster)
        namespace, name = _split(external_id)
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            pod = session.connection.get(path)
            labels = pod["metadata"].get("labels") or {}
            if labels.get(names.ALLOCATION, str(uid)) != str(uid):
                raise TerminalFailure("adopted_already", f"{external_id} carries another allocation")
            if is_over(pod):
                raise TerminalFailure("work_over", f"{external_id} has ended")
            # Who manages it stays as it is written: a controller that missed its pod would begin another one.
            self._label(session, external_id, {names.ALLOCATION: str(uid), names.MEMBER: "0"})
        except Problem as problem:
            raise failure(problem, f"adoption of {external_id}") from problem

    def disown(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """Take these labels off again."""
        session = self._session(cluster)
        namespace, name = _split(external_id)
        try:
            pod = session.connection.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
            if (pod["metadata"].get("labels") or {}).get(names.ALLOCATION) == str(uid):
                self._label(session, external_id, {names.ALLOCATION: None, names.MEMBER: None})
        except Problem as problem:
            if problem.code != NOT_FOUND:
                raise failure(problem, f"end of the adoption of {external_id}") from problem

    def _label(self, session: Session, external_id: str, labels: dict[str, str | None]) -> None:
        namespace, name = _split(external_id)
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        session.view.pods[external_id] = slim(
            session.connection.patch(path, {"metadata": {"labels": labels}})
        )

    def layout(self, *, node: Node) -> Layout:
        """The node's MIG layout as MIG Manager's labels say."""
        return layout_of(self._session(node.cluster), node.name)

    def layout_set(self, *, node: Node, config: str) -> Layout:
        """Ask MIG Manager for another one; see ``mig.layout_set`` for what must hold."""
        return layout_set(self._session(node.cluster), node.name, config)

    def limits(self, *, cluster: Cluster) -> list[Limit]:
        """Departments' limits as ResourceQuotas of their namespaces: as they are, and as they should be."""
        return compared(self._session(cluster), cluster)

    def limits_set(self, *, cluster: Cluster, limits: Sequence[Limit]) -> None:
        """Make these as wanted."""
        pushed(self._session(cluster), cluster, limits)


def _split(external_id: str) -> tuple[str, str]:
    namespace, _, name = external_id.partition("/")
    if not namespace or not name or "/" in name:
        raise TerminalFailure("work_unknown", f"no pod is called {external_id[:80]!r}")
    return namespace, name


def _where(session: Session, member: AllocationMember) -> tuple[str, str]:
    """Namespace and name of a member's pod: as it was seen (an adopted one is elsewhere), else as we would make it."""
    if "/" in member.external_id:
        return _split(member.external_id)
    allocation = member.allocation
    space = names.namespace_of(allocation.department.code, session.options.namespace_prefix)
    return space, names.pod_name(allocation.uid, member.number)


def _path(session: Session, member: AllocationMember) -> str:
    namespace, name = _where(session, member)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _went(session: Session, member: AllocationMember) -> Observation:
    """A member without a pod: known to have gone, or never seen."""
    namespace, name = _where(session, member)
    pod = session.view.gone.get(f"{namespace}/{name}")
    if pod is None or _key(pod) != (member.allocation.uid, member.number):
        return Observation("unknown")
    return departed(pod, _wanted(member))


def _wanted(member: AllocationMember) -> bool:
    """Whether nobody here asked for its end."""
    return member.allocation.state in WANTED and member.stop_ordered_at is None


def _key(pod: dict[str, Any]) -> Key | None:
    labels = pod["metadata"].get("labels") or {}
    try:
        return UUID(labels[names.ALLOCATION]), int(labels.get(names.MEMBER, "0"))
    except (KeyError, ValueError):
        return None


def _others(pods: Iterable[dict[str, Any]], asked: set[Key]) -> list[Work]:
    """Pods that hold cards or carry an allocation, and were not asked for.

    Which card a device plugin gave is not told by the API: foreign pods count from the first card of their node.
    """
    out: list[Work] = []
    used: dict[str, int] = {}
    for pod in sorted(pods, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])):
        key, spec, meta = _key(pod), pod["spec"], pod["metadata"]
        if (key is not None and key in asked) or pod["status"].get("phase") in ("Succeeded", "Failed"):
            continue
        node = spec.get("nodeName")
        if key is None and not (spec["gpus"] and node):
            continue
        begun = observed(pod)
        cards: dict[str, tuple[int, ...]] = {}
        if key is None and node:
            at = used.get(node, 0)
            used[node] = at + spec["gpus"]
            cards = {node: tuple(range(at, at + spec["gpus"]))}
        out.append(
            Work(
                external_id=f"{meta['namespace']}/{meta['name']}",
                nodes=(node,) if node else (),
                user=begun.account,
                account=meta["namespace"],
                name=meta["name"],
                gpus=spec["gpus"],
                gpu_indexes=cards,
                cpu_milli=spec["cpu_milli"],
                memory_mib=spec["memory_mib"],
                started_at=begun.started_at,
                uid=key[0] if key else None,
                number=key[1] if key else None,
            )
        )
    return out
