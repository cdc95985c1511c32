"""What the scheduler is told of a node's health."""

from __future__ import annotations

import pytest

from pool.models import Cluster, Node
from pool.selectors.planner_nodes import nodes_read
from pool.services.planner import PlannerMemory
from quotas.models import GpuFlavour
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("health", "caution", "blocked"),
    [
        ("ok", False, None),
        ("late", True, None),
        ("suspect", False, "suspect"),
        ("unknown", False, "no_agent"),
    ],
)
def test_a_late_node_takes_work_last(health: str, caution: bool, blocked: str | None) -> None:
    node = pool.node(build.flavour("h800", installed=None), gpus=1)
    Node.objects.filter(pk=node.pk).update(health=health)
    found = nodes_read(GpuFlavour.objects.all())[node.pk]
    assert (found.caution, found.blocked) == (caution, blocked)


def test_where_images_run_is_told_by_the_agent_or_the_clusters_settings() -> None:
    node = pool.node(build.flavour("h800", installed=None), gpus=1)

    def no_images() -> bool:
        return nodes_read(GpuFlavour.objects.all())[node.pk].no_images

    assert not no_images(), "an agent that has not said is not passed over"
    Node.objects.filter(pk=node.pk).update(
        facts={"can": {"containers": {"ok": False, "reason": "no_podman"}}}
    )
    assert no_images()
    Cluster.objects.filter(pk=node.cluster_id).update(executor="kubernetes")
    assert not no_images()
    Cluster.objects.filter(pk=node.cluster_id).update(executor="slurm")
    assert no_images()
    Cluster.objects.filter(pk=node.cluster_id).update(settings={"image_runner": "apptainer"})
    assert not no_images()


@pytest.mark.django_db(transaction=True)
def test_the_planner_hears_what_runs_images_without_reading_all_anew() -> None:
    node = pool.node(build.flavour("h800", installed=None), gpus=1)
    memory = PlannerMemory()
    memory.refresh()
    memory.planned()
    Node.objects.filter(pk=node.pk).update(facts={"can": {"containers": {"ok": False}}})
    assert memory.refresh().freed == "node"
    assert (memory.nodes[node.pk].no_images, memory.loads) == (True, 1)
    Cluster.objects.filter(pk=node.cluster_id).update(executor="kubernetes")
    memory.refresh()
    assert (memory.nodes[node.pk].no_images, memory.loads) == (False, 1)
