"""The Kubernetes executor on a real control plane (1.20), with a stand-in kubelet that runs pods as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native import k8s
from tests.parts import missing
from tests.pool.executors.conformance import Conformance
from tests.pool.executors.kubernetes_kubelet import Kubelet
from tests.pool.executors.kubernetes_plane import Plane
from tests.pool.executors.kubernetes_rig import KubernetesRig, administrator

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
