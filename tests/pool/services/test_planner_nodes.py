"""What the scheduler is told of a node's health."""

from __future__ import annotations

import pytest

from pool.models import Node
from pool.selectors.planner_nodes import nodes_read
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
