"""The Kubernetes executor on a real control plane (1.20), with a stand-in kubelet that runs pods as processes."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from django.core.management import CommandError, call_command
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from pool.executors.base import ExecutorFailure, RetryableFailure, TerminalFailure
from pool.executors.kubernetes import names, sweeping
from pool.executors.kubernetes.connection import Connection, Problem
from pool.executors.kubernetes.mig import Layout
from pool.models import Allocation, AllocationLog, AllocationMember, Cluster, Lease
from pool.services import stopping
from pool.services.adoption import work_adopt
from pool.services.cycle import schedule_cycle
from pool.services.nodes import node_cordon, node_uncordon
from pool.services.outside_limits import limits_diff, limits_push
from pool.services.outside_nodes import nodes_import
from pool.services.outside_output import outputs_follow
from portal.kernel.errors import Blocked
from portal.ops.models import AuditEvent
from quotas.models import LedgerEntry, QuotaGrant, QuotaUsage
from quotas.services.requests import request_submit
from tests.native import k8s
from tests.parts import missing
from tests.pool.executors.conformance import TESTER, Conformance, allocation, state
from tests.pool.executors.kubernetes_kubelet import Kubelet
from tests.pool.executors.kubernetes_plane import Plane
from tests.pool.executors.kubernetes_rig import (
    ADMIN,
    GPU,
    LABELS,
    KubernetesRig,
    administrator,
    inline,
    wait_for,
)
from tests.pool.executors.place import only_member, reserved
from tests.quotas import build

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
A = Allocation.State
M = AllocationMember.State
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial, pytest.mark.kubernetes]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """One control plane for all tests."""
    lacks = k8s.lacking()
    if lacks:
        missing(lacks)
    made = Plane(Path(tmp_path_factory.mktemp("kubernetes")))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def kubelet(plane: Plane) -> Iterator[Kubelet]:
    made = Kubelet(plane, administrator(plane))
    yield made
    made.close()


@pytest.fixture
def rig(plane: Plane, kubelet: Kubelet, transactional_db: None) -> Iterator[KubernetesRig]:
    """A cluster with one node of two cards."""
    with KubernetesRig(plane, kubelet) as made:
        yield made


class TestConformance(Conformance):
    @pytest.fixture
    def rig(self, plane: Plane, kubelet: Kubelet, transactional_db: None) -> Iterator[KubernetesRig]:
        with KubernetesRig(plane, kubelet) as made:
            yield made


def refresh(member: AllocationMember) -> AllocationMember:
    """The member as it is now, with all that an executor reads."""
    return AllocationMember.objects.select_related(
        "node__cluster", "allocation__request", "allocation__holder", "allocation__department"
    ).get(pk=member.pk)


def started(rig: KubernetesRig, command: str = "sleep 600", gpus: int = 1, **values: Any) -> AllocationMember:
    member = rig.member(command, gpus, **values)
    assert rig.start(member), allocation(member).error_detail
    rig.settle(lambda: state(member) == M.RUNNING)
    return refresh(member)


def told(member: AllocationMember) -> str:
    """Its output, as far as it was followed."""
    pieces = AllocationLog.objects.filter(allocation=member.allocation_id).order_by("offset")
    return "".join(pieces.values_list("data", flat=True))


def end(rig: KubernetesRig, member: AllocationMember, grace_s: int = 5) -> Allocation:
    stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="released", grace_s=grace_s)
    rig.settle(lambda: allocation(member).state == A.ENDED)
    return allocation(member)


def work_of_cluster(rig: KubernetesRig) -> list[dict[str, Any]]:
    """What the last look saw of others on the rig's nodes."""
    rig.cluster.refresh_from_db()
    return [one for one in rig.cluster.foreign_work if set(rig.nodes) & set(one["nodes"])]


def bare_pod(
    rig: KubernetesRig,
    name: str,
    gpus: int = 1,
    namespace: str = "default",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A pod of somebody who does not come through the pool."""
    amount = {GPU: str(gpus)}
    return rig.api.create(
        f"/api/v1/namespaces/{namespace}/pods",
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {
                "nodeName": rig.nodes[0],
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "work",
                        "image": "busybox",
                        "command": ["sleep", "600"],
                        "resources": {"limits": amount, "requests": amount},
                    }
                ],
            },
        },
    )


class TestLife:
    def test_from_the_request_to_the_ledger(self, rig: KubernetesRig) -> None:
        """Asked, approved by itself, placed, bound to the chosen node, run, ended, seen free, charged."""
        person = build.user(home=rig.team)
        build.role(person, "researcher", rig.team)
        build.price(rig.flavour, 16)
        wishes = {
            "department": rig.team.code,
            "flavour": rig.flavour.code,
            "gpus_per_node": 2,
            "duration_s": 3600,
            "purpose": "a test",
            "command": "echo hello $GPUPOOL_REQUEST; sleep 600",
        }
        request = request_submit(acting_user=build.actor(person), policy=build.policy(person), values=wishes)
        assert request.state == "queued"
        with patch("pool.tasks.start_allocation.apply_async"):
            schedule_cycle()
        member = only_member(Allocation.objects.get(request=request))
        assert rig.start(member)
        rig.settle(lambda: state(member) == M.RUNNING)
        pod = rig.pod(member)
        assert (pod["spec"]["nodeName"], pod["metadata"]["namespace"]) == (rig.nodes[0], rig.namespace)
        assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "2"
        wait_for(lambda: bool(outputs_follow(cluster_id=rig.cluster.pk) or told(member)))
        assert told(member) == f"hello {request.ref}\n"
        assert QuotaUsage.objects.get(department=rig.team, flavour=rig.flavour).direct == 2000
        rig.finish(member, 0)
        rig.settle(lambda: allocation(member).state == A.ENDED)
        row = allocation(member)
        assert (row.end_reason, row.exit_code) == (Allocation.EndReason.FINISHED, 0)
        assert QuotaUsage.objects.get(department=rig.team, flavour=rig.flavour).direct == 0
        lines = LedgerEntry.objects.filter(request_id_ref=request.pk)
        assert sorted({line.node_name for line in lines}) == [rig.nodes[0]]
        assert sum(line.gpu_ms for line in lines) > 0
        assert [line.micro_per_gpu_hour for line in lines] == [16_000_000] * 2

    def test_ended_pods_are_swept_when_their_output_was_read(self, rig: KubernetesRig) -> None:
        member = started(rig)
        rig.finish(member)
        rig.settle(lambda: allocation(member).state == A.ENDED)
        assert len(rig.pods(member)) == 1
        with patch.object(sweeping, "KEPT", sweeping.timedelta(0)):
            rig.settle(lambda: not rig.pods(member))

    def test_an_image_that_is_not_there_ends_the_start(self, rig: KubernetesRig) -> None:
        member = rig.member("true", run_kind="image", image="registry.example/missing:1")
        assert rig.start(member)
        rig.settle(lambda: allocation(member).state == A.ENDED)
        row = allocation(member)
        assert (row.end_reason, row.error_code) == (Allocation.EndReason.START_FAILED, "image_not_pulled")
        assert rig.pods(member) == []

    def test_removed_over_there_goes_back_in_line_with_its_cause(self, rig: KubernetesRig) -> None:
        member = started(rig)
        meta = rig.pod(member)["metadata"]
        rig.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", 1)
        rig.settle(lambda: allocation(member).state == A.ENDED)
        assert (allocation(member).error_code, allocation(member).end_rule) == ("removed_there", "requeue")

    def test_a_namespace_removed_under_us_is_made_again(self, rig: KubernetesRig) -> None:
        member = started(rig)
        rig.api.delete(f"/api/v1/namespaces/{rig.namespace}")
        with patch("pool.tasks.start_allocation.apply_async"):
            rig.settle(lambda: allocation(member).state == A.ENDED)
        assert allocation(member).end_rule == "requeue"
        schedule_cycle()
        again = only_member(Allocation.objects.exclude(state=A.ENDED).get(request=allocation(member).request))
        wait_for(lambda: bool(rig.look() or rig.start(again) or state(again) == M.RUNNING))
        rig.settle(lambda: state(again) == M.RUNNING)
        assert rig.copies(again) == 1


class TestGangs:
    @pytest.fixture
    def two(self, plane: Plane, kubelet: Kubelet, transactional_db: None) -> Iterator[KubernetesRig]:
        with KubernetesRig(plane, kubelet, cards=(2, 2)) as made:
            yield made

    def gang(self, rig: KubernetesRig) -> list[AllocationMember]:
        made = reserved(rig.team, rig.flavour, 2, nodes=2, command='echo "$NODE_RANK of $NNODES"; sleep 600')
        return list(made.members.select_related("node", "allocation").order_by("number"))

    def test_members_run_on_their_nodes_and_know_each_other(self, two: KubernetesRig) -> None:
        members = self.gang(two)
        assert two.start(members[0])
        two.settle(lambda: {state(one) for one in members} == {M.RUNNING})
        assert [two.pod(one)["spec"]["nodeName"] for one in members] == [one.node.name for one in members]
        group = names.group_name(members[0].allocation.uid)
        service = two.api.get(f"/api/v1/namespaces/{two.namespace}/services/{group}")
        assert service["spec"]["clusterIP"] == "None"
        wait_for(
            lambda: bool(outputs_follow(cluster_id=two.cluster.pk) == 0 and told(members[0]).count("of") == 2)
        )
        said = AllocationLog.objects.filter(allocation=members[0].allocation_id).order_by("member")
        assert [piece.data for piece in said] == ["0 of 2\n", "1 of 2\n"]
        two.finish(members[1], 1)
        two.settle(lambda: allocation(members[0]).state == A.ENDED)
        assert [two.copies(one) for one in members] == [0, 0]
        with patch.object(sweeping, "KEPT", sweeping.timedelta(0)):
            two.settle(lambda: not any(two.pods(one) for one in members))
        with pytest.raises(Problem):
            two.api.get(f"/api/v1/namespaces/{two.namespace}/services/{group}")

    def test_none_begins_where_one_cannot(self, two: KubernetesRig) -> None:
        members = self.gang(two)
        two.api.patch(f"/api/v1/nodes/{members[1].node.name}", {"spec": {"unschedulable": True}})
        assert two.start(members[0]) is False
        assert allocation(members[0]).error_code == "node_closed"
        assert [two.pods(one) for one in members] == [[], []]
        two.api.patch(f"/api/v1/nodes/{members[1].node.name}", {"spec": {"unschedulable": None}})
        two.refuse()
        assert two.start(members[0]) is False
        two.settle(lambda: allocation(members[0]).state == A.ENDED)
        assert [two.copies(one) for one in members] == [0, 0]


class TestStops:
    def test_eviction_in_the_version_that_the_cluster_has(self, rig: KubernetesRig) -> None:
        member = started(rig, "trap 'exit 0' TERM; while :; do sleep 0.1; done")
        assert end(rig, member).end_reason == Allocation.EndReason.RELEASED
        assert rig.session.eviction == "policy/v1beta1"

    def test_a_disruption_budget_keeps_nothing_from_ending(self, rig: KubernetesRig) -> None:
        member = started(rig)
        budget = {
            "apiVersion": "policy/v1beta1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "never"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {names.MANAGED_BY: names.US}}},
        }
        rig.api.create(f"/apis/policy/v1beta1/namespaces/{rig.namespace}/poddisruptionbudgets", budget)
        assert end(rig, member).end_reason == Allocation.EndReason.RELEASED


class TestNodes:
    def test_closed_here_is_closed_there_and_open_again(self, rig: KubernetesRig) -> None:
        node = rig.cluster.nodes.get()
        node_cordon(acting_user=ADMIN, node=node, reason="new memory")
        rig.look()
        found = rig.api.get(f"/api/v1/nodes/{node.name}")
        assert [one["key"] for one in found["spec"]["taints"]] == [names.CORDONED]
        assert found["metadata"]["annotations"][names.CORDONED] == "gpupool: new memory"
        rig.executor.cordon(node=node, reason="gpupool: new memory")
        version = rig.api.get(f"/api/v1/nodes/{node.name}")["metadata"]["resourceVersion"]
        assert version == found["metadata"]["resourceVersion"]
        node.refresh_from_db()
        node_uncordon(acting_user=ADMIN, node=node, reason="done")
        rig.look()
        assert "taints" not in rig.api.get(f"/api/v1/nodes/{node.name}")["spec"]

    def test_closed_there_is_closed_here_and_ours_takes_back_nothing_of_theirs(
        self, rig: KubernetesRig
    ) -> None:
        node = rig.cluster.nodes.get()
        path = f"/api/v1/nodes/{node.name}"
        theirs = {"spec": {"unschedulable": True, "taints": [{"key": "disk", "effect": "NoSchedule"}]}}
        rig.api.patch(path, theirs)
        rig.look()
        node.refresh_from_db()
        assert (node.schedulable, node.schedulable_reason) == ("cordoned", "cordoned_there")
        rig.executor.cordon(node=node, reason="gpupool: ours")
        rig.executor.uncordon(node=node)
        spec = rig.api.get(path)["spec"]
        assert (spec["unschedulable"], "disk" in [one["key"] for one in spec["taints"]]) == (True, True)
        rig.api.patch(path, {"spec": {"unschedulable": None, "taints": None}})
        rig.look()
        node.refresh_from_db()
        assert node.schedulable == "open"

    def test_a_node_that_is_not_ready_gets_nothing(self, rig: KubernetesRig) -> None:
        member = rig.member()
        rig.kubelet.status(rig.nodes[0], {GPU: 2}, ready=False)
        assert rig.start(member) is False
        assert (allocation(member).error_code, rig.pods(member)) == ("node_closed", [])
        rig.kubelet.status(rig.nodes[0], {GPU: 2})
        assert rig.start(member)

    def test_an_ill_card_is_no_longer_offered(self, rig: KubernetesRig) -> None:
        member = started(rig)
        path = f"/api/v1/nodes/{rig.nodes[0]}/status"
        rig.api.patch(path, {"status": {"allocatable": {GPU: "1"}}})
        rig.look()
        held = member.allocation.leases.get(ended_at=None).gpu_id
        conditions = dict(rig.cluster.nodes.get().gpus.values_list("pk", "condition"))
        assert conditions.pop(held) == "ok"
        assert list(conditions.values()) == ["vanished"]
        assert (state(member), rig.copies(member)) == (M.RUNNING, 1)


class TestLimits:
    def test_quotas_are_compared_then_pushed_and_hold(self, rig: KubernetesRig) -> None:
        member = rig.member(gpus=2)
        QuotaGrant.objects.create(
            department=rig.team,
            flavour=rig.flavour,
            guaranteed=1000,
            hard_cap=1000,
            during=DateTimeTZRange(None, None),
        )
        (change,) = [one for one in limits_diff(cluster=rig.cluster) if one.scope == rig.namespace]
        assert (change.resource, change.there, change.wanted) == (f"requests.{GPU}", None, 1)
        seen = limits_diff(cluster=rig.cluster)
        limits_push(acting_user=ADMIN, cluster=rig.cluster, seen=seen)
        assert limits_diff(cluster=rig.cluster) == []
        limits_push(acting_user=ADMIN, cluster=rig.cluster, seen=[])
        quota = rig.api.get(f"/api/v1/namespaces/{rig.namespace}/resourcequotas/gpupool")
        assert quota["spec"]["hard"] == {f"requests.{GPU}": "1"}
        wait_for(
            lambda: bool(rig.api.get(f"/api/v1/namespaces/{rig.namespace}/resourcequotas/gpupool")["status"])
        )
        assert rig.start(member) is False
        assert (allocation(member).error_code, allocation(member).state) == ("quota_there", A.STARTING)
        QuotaGrant.objects.update(hard_cap=None, borrow_limit=None)
        limits_push(acting_user=ADMIN, cluster=rig.cluster, seen=limits_diff(cluster=rig.cluster))
        with pytest.raises(Problem):
            rig.api.get(f"/api/v1/namespaces/{rig.namespace}/resourcequotas/gpupool")
        wait_for(lambda: rig.start(member))


class TestAccess:
    def test_a_refused_credential_is_an_outage_with_its_name(self, rig: KubernetesRig) -> None:
        member = started(rig)
        rig.credential("no-such-token")
        rig.look()
        rig.cluster.refresh_from_db()
        assert rig.cluster.away_code == "credential_refused"
        assert [item[:2] for item in rig.executor.check(cluster=rig.cluster).findings] == [
            ("credential_refused", False)
        ]
        assert (state(member), allocation(member).state) == (M.RUNNING, A.RUNNING)
        rig.credential("the-administrator-of-the-tests")
        rig.look()
        rig.cluster.refresh_from_db()
        assert (rig.cluster.away_code, rig.cluster.away_since) == ("", None)

    def test_the_least_rights_are_enough_and_no_more(
        self, plane: Plane, kubelet: Kubelet, transactional_db: None
    ) -> None:
        """The manifest of `deploy/kubernetes` applied, and a whole life with that account's own token."""
        api = kubelet.api
        for document in yaml.safe_load_all((DEPLOY / "gpupool.yaml").read_text(encoding="utf-8")):
            _apply(api, document)
        token = api.create(
            "/api/v1/namespaces/gpupool-system/serviceaccounts/gpupool/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3600},
            },
        )["status"]["token"]
        wait_for(lambda: _answers(Connection(inline(plane, token)), "/api/v1/nodes"))
        with KubernetesRig(plane, kubelet, token=token) as rig:
            findings = rig.executor.check(cluster=rig.cluster).findings
            assert [item[0] for item in findings if not item[1]] == [
                "credential_lasts"
            ]  # an hour is not a week
            member = started(rig, "trap 'exit 0' TERM; echo hello; while :; do sleep 0.1; done")
            wait_for(lambda: bool(outputs_follow(cluster_id=rig.cluster.pk) or told(member)))
            assert told(member) == "hello\n"
            node_cordon(acting_user=ADMIN, node=rig.cluster.nodes.get(), reason="new memory")
            rig.look()
            assert rig.api.get(f"/api/v1/nodes/{rig.nodes[0]}")["spec"]["taints"][0]["key"] == names.CORDONED
            assert end(rig, member).end_reason == Allocation.EndReason.RELEASED
            us = Connection(inline(plane, token))
            for path in ("/api/v1/secrets", "/api/v1/configmaps", "/apis/apps/v1/deployments"):
                with pytest.raises(Problem) as refused:
                    us.get(path)
                assert refused.value.code == 403
            with pytest.raises(Problem) as refused:
                us.create(
                    f"/api/v1/namespaces/{rig.namespace}/pods/{names.pod_name(member.allocation.uid, 0)}/exec",
                    {},
                )
            assert refused.value.code == 403
            # The account goes: its token ends with it, and that is said.
            rig.api.delete("/api/v1/namespaces/gpupool-system/serviceaccounts/gpupool")
            wait_for(lambda: rig.executor.check(cluster=rig.cluster).findings[0][0] == "credential_refused")

    def test_one_cluster_away_leaves_the_other_alone(
        self, plane: Plane, kubelet: Kubelet, transactional_db: None
    ) -> None:
        with KubernetesRig(plane, kubelet) as one, KubernetesRig(plane, kubelet) as other:
            one.executor = other.executor
            one.cluster.nodes.update(health="suspect")  # nothing is placed there
            one.away()
            with pytest.raises(RetryableFailure, match="cluster_away"):
                one.executor.discover(cluster=one.cluster)
            member = started(other)
            one.look()
            one.cluster.refresh_from_db()
            other.cluster.refresh_from_db()
            assert (one.cluster.away_code, other.cluster.away_code) == ("cluster_away", "")
            assert state(member) == M.RUNNING

    def test_a_place_that_the_server_forgot_is_listed_anew(self, rig: KubernetesRig) -> None:
        member = started(rig)
        view = rig.session.view
        lists, resumes = view.lists, view.resumes
        rig.look()
        assert (view.lists, view.resumes) == (lists, resumes + 1)
        view.version = "1"
        view.pods.clear()
        rig.look()
        assert view.lists == lists + 1
        assert (state(member), len(view.pods) > 0) == (M.RUNNING, True)


class TestOthers:
    def test_foreign_pods_are_seen_on_their_cards_and_can_be_adopted(self, rig: KubernetesRig) -> None:
        name = f"theirs-{rig.team.code}"
        bare_pod(rig, name)
        mine: list[dict[str, Any]] = []

        def seen() -> bool:
            rig.cluster.refresh_from_db()
            mine[:] = [one for one in rig.cluster.foreign_work if rig.nodes[0] in one["nodes"]]
            return bool(mine)

        rig.settle(seen)
        assert [(one["id"], one["gpus"], one["account"]) for one in mine] == [
            (f"default/{name}", 1, "default")
        ]
        used = [gpu.index for gpu in rig.cluster.nodes.get().gpus.all() if gpu.foreign_use]
        assert used == [0]
        member = rig.member()
        rig.executor.adopt(cluster=rig.cluster, external_id=f"default/{name}", uid=member.allocation.uid)
        rig.executor.adopt(cluster=rig.cluster, external_id=f"default/{name}", uid=member.allocation.uid)
        look = rig.executor.look(cluster=rig.cluster, members=[member], nodes=False)
        assert look.members[(member.allocation.uid, 0)].external_id == f"default/{name}"
        with pytest.raises(TerminalFailure, match="adopted_already"):
            rig.executor.adopt(cluster=rig.cluster, external_id=f"default/{name}", uid=rig.cluster.uid)
        rig.executor.end(cluster=rig.cluster, external_id=f"default/{name}")
        rig.settle(lambda: not rig.pods(member))

    def test_a_running_pod_is_taken_in_and_stays_its_controllers(self, rig: KubernetesRig) -> None:
        name, helm = f"theirs-{rig.team.code}", "Helm"
        bare_pod(rig, name, labels={names.MANAGED_BY: helm})
        path = f"/api/v1/namespaces/default/pods/{name}"
        cards = rig.cluster.nodes.get().gpus
        rig.settle(lambda: cards.exclude(foreign_use=[]).exists() and work_of_cluster(rig)[0]["started_at"])
        who = build.user("", rig.team)
        build.role(who, "researcher", rig.team)
        asked = {"department": rig.team.code, "duration_s": 3600, "purpose": "ran", "interruptible": False}

        def adopt() -> Allocation:
            return work_adopt(
                acting_user=ADMIN, cluster=rig.cluster, external_id=f"default/{name}",
                person=who.username, values=asked,
            )  # fmt: skip

        QuotaUsage.objects.filter(department=rig.team).update(hard_cap=0)
        with pytest.raises(Blocked):
            adopt()
        assert rig.api.get(path)["metadata"]["labels"] == {names.MANAGED_BY: helm}
        QuotaUsage.objects.filter(department=rig.team).update(hard_cap=None)
        row = adopt()
        labels = {names.MANAGED_BY: helm, names.ALLOCATION: str(row.uid), names.MEMBER: "0"}
        assert rig.api.get(path)["metadata"]["labels"] == labels
        rig.look()
        member = only_member(row)
        assert (row.state, state(member), rig.copies(member)) == (A.RUNNING, M.RUNNING, 1)
        assert Lease.objects.get(allocation=row).gpu == cards.get(index=0)
        assert not cards.exclude(foreign_use=[]).exists()
        end(rig, member)
        assert allocation(member).request.state == "ended"

    def test_a_stray_of_ours_is_ended(self, rig: KubernetesRig) -> None:
        member = started(rig)
        Allocation.objects.filter(pk=member.allocation_id).update(state=A.ENDED, ended_at=member.started_at)
        AllocationMember.objects.filter(pk=member.pk).update(state=M.FREE)
        rig.settle(lambda: rig.copies(member) == 0)


class TestMig:
    def test_instances_are_asked_for_by_profile(
        self, plane: Plane, kubelet: Kubelet, transactional_db: None
    ) -> None:
        labels = {
            **LABELS,
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
            "nvidia.com/gpu.memory": "81920",
            "nvidia.com/gpu.count": "1",
            "nvidia.com/mig.strategy": "mixed",
            "nvidia.com/mig.config.state": "success",
        }
        with KubernetesRig(plane, kubelet, cards=(1,)) as rig:
            name = f"mig-{rig.team.code}"
            resources = {GPU: 0, "nvidia.com/mig-3g.40gb": 1, "nvidia.com/mig-1g.10gb": 2}
            kubelet.node(name, resources, labels)
            rig.nodes.append(name)
            found = [one for one in rig.executor.discover(cluster=rig.cluster) if one.name == name]
            nodes_import(acting_user=ADMIN, cluster=rig.cluster, found=found)
            card = Cluster.objects.get(pk=rig.cluster.pk).nodes.get(name=name).gpus.get()
            assert sorted(one.profile for one in card.mig_slices.all()) == ["1g.10gb", "1g.10gb", "3g.40gb"]
            build.limits(rig.team, card.flavour, 1)
            row = reserved(
                rig.team,
                card.flavour,
                shape="mig",
                mig_profile="1g.10gb",
                mig_count=2,
                charge_milli=284,
                command="sleep 600",
            )
            member = only_member(row)
            assert rig.start(member)
            rig.settle(lambda: state(member) == M.RUNNING)
            pod = rig.pod(member)
            assert pod["spec"]["nodeName"] == name
            assert pod["spec"]["containers"][0]["resources"]["limits"] == {
                **pod["spec"]["containers"][0]["resources"]["limits"],
                "nvidia.com/mig-1g.10gb": "2",
            }
            assert GPU not in pod["spec"]["containers"][0]["resources"]["limits"]

    def test_a_layout_is_asked_of_mig_manager_on_a_drained_node_alone(self, rig: KubernetesRig) -> None:
        node = rig.cluster.nodes.get()
        path, config, said = (
            f"/api/v1/nodes/{node.name}",
            "nvidia.com/mig.config",
            "nvidia.com/mig.config.state",
        )

        def refused(wanted: str = "all-1g.10gb") -> str:
            with pytest.raises(ExecutorFailure) as error:
                rig.executor.layout_set(node=node, config=wanted)
            return error.value.code

        assert refused("all 1g; rm") == "mig_config_wrong"
        assert refused() == "mig_not_managed"
        rig.api.patch(path, {"metadata": {"labels": {config: "all-disabled", said: "success"}}})
        assert refused() == "node_not_closed"
        member = started(rig)
        node_cordon(acting_user=ADMIN, node=node, reason="new layout")
        rig.look()
        assert refused() == "node_in_use"
        assert rig.api.get(path)["metadata"]["labels"][config] == "all-disabled"
        with pytest.raises(CommandError, match="node_in_use"):
            call_command("mig_layout", node.name, "all-1g.10gb")
        end(rig, member)
        out = StringIO()
        call_command("mig_layout", node.name, "all-1g.10gb", stdout=out)
        call_command("mig_layout", node.name, stdout=out)
        assert out.getvalue() == f"{node.name}: all-1g.10gb pending\n" * 2
        asked = AuditEvent.objects.get(action="node.mig_config")
        assert (asked.before["config"], asked.after["config"]) == ("all-disabled", "all-1g.10gb")
        assert rig.api.get(path)["metadata"]["labels"][config] == "all-1g.10gb"
        assert rig.executor.layout_set(node=node, config="all-1g.10gb").settled is False
        assert refused("all-3g.40gb") == "mig_under_way"
        rig.api.patch(path, {"metadata": {"labels": {said: "rebooting"}}})
        assert rig.executor.layout(node=node).settled is False
        rig.api.patch(path, {"metadata": {"labels": {said: "failed"}}})
        assert rig.executor.layout(node=node) == Layout("all-1g.10gb", "failed")
        assert rig.executor.layout_set(node=node, config="all-1g.10gb").state == "pending"
        rig.api.patch(path, {"metadata": {"labels": {said: "success"}}})
        # It says so before the device plugin offers an instance: only then is there one.
        assert rig.executor.layout(node=node) == Layout("all-1g.10gb", "not_there")
        count = node.gpus.count()
        rig.api.patch(path, {"metadata": {"labels": {"nvidia.com/gpu.count": str(count)}}})
        rig.kubelet.status(node.name, {GPU: 0, "nvidia.com/mig-1g.10gb": 7 * count})
        assert rig.executor.layout(node=node) == Layout("all-1g.10gb", "success")
        call_command("mig_layout", node.name, "--wait", "1", stdout=out)
        assert out.getvalue().endswith("all-1g.10gb success\n")


def _answers(connection: Connection, path: str) -> bool:
    """Whether this account may read it by now: rights take a moment to reach the API server's own view."""
    try:
        connection.get(path)
    except Problem:
        return False
    return True


def _apply(api: Connection, document: dict[str, Any]) -> None:
    """As ``kubectl apply`` of something new."""
    version, kind, meta = document["apiVersion"], document["kind"], document["metadata"]
    base = "/api/v1" if version == "v1" else f"/apis/{version}"
    if "namespace" in meta:
        base += f"/namespaces/{meta['namespace']}"
    plural = kind.lower() + "s"
    try:
        api.create(f"{base}/{plural}", document)
    except Problem as problem:
        assert problem.code == 409
