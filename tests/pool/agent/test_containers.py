"""Images by podman and CDI: the exact command, what it may see, and what is refused. (A stand-in podman; the README of
the executor says so.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool.agent import containers
from pool.agent.containers import NoContainers

CDI = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: "0"
    containerEdits: {}
  - name: GPU-b
  - name: MIG-1
"""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with podman and CDI files."""
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").write_text(CDI)
    monkeypatch.setenv("GPUPOOL_PODMAN", str(program))
    monkeypatch.setenv("GPUPOOL_CDI_DIRS", str(tmp_path / "cdi"))
    return tmp_path


def command(**spec: Any) -> list[str]:
    given = {"image": "registry.example/team/train:1.2", "gpu_uuids": ["GPU-a"], **spec}
    environment = ("MINE", "CUDA_VISIBLE_DEVICES", "PATH", "HOME", "CONTAINERS_CONF", "XDG_RUNTIME_DIR")
    return containers.command(given, "gpupool-x", "/work/R-1", environment, {"GPU-a": 0, "GPU-b": 1})


def test_the_command_names_the_leased_devices_and_hides_values(node: Path) -> None:
    words = command(command="python train.py; echo 'a b'", gpu_uuids=["GPU-a", "GPU-b"])
    assert words[0] == str(node / "podman") and words[words.index("run") + 1] == "--rm"
    assert words[words.index("--cap-drop") :][:2] == ["--cap-drop", "all"] and "--privileged" not in words
    devices = [words[at + 1] for at, word in enumerate(words) if word == "--device"]
    assert devices == ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-b"]  # by index where CDI names none by UUID
    passed = [words[at + 1] for at, word in enumerate(words) if word == "--env"]
    assert passed == ["CUDA_VISIBLE_DEVICES", "MINE"]
    assert words[words.index("--volume") + 1] == "/work/R-1:/work/R-1"
    assert words[-4:] == ["registry.example/team/train:1.2", "/bin/sh", "-c", "python train.py; echo 'a b'"]
    assert command()[-1] == "registry.example/team/train:1.2"  # the image's own command
    assert "nvidia.com/gpu=MIG-1" in command(mig_uuids=["MIG-1"])


@pytest.mark.parametrize(
    "image", ["", "--privileged", "-v/:/host", "a b", "a\nb", "a;b", "$(id)", "a\0b", "x" * 301, "图像"]
)
def test_images_with_tricks_are_refused(image: str) -> None:
    with pytest.raises(NoContainers) as caught:
        command(image=image)
    assert caught.value.code == "image_refused"


def test_a_node_says_what_it_lacks(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert containers.capability() == {"ok": True, "reason": None}
    with pytest.raises(NoContainers) as caught:
        command(gpu_uuids=["GPU-unknown"])
    assert caught.value.code == "cdi_device_missing"
    monkeypatch.setenv("GPUPOOL_CDI_DIRS", str(node / "none"))
    assert containers.capability() == {"ok": False, "reason": "no_cdi"}
    monkeypatch.setenv("GPUPOOL_PODMAN", "no-such-program")
    assert containers.capability() == {"ok": False, "reason": "no_podman"}
    with pytest.raises(NoContainers) as caught:
        command()
    assert caught.value.code == "containers_missing"


def test_a_persons_variables_do_not_steer_podman() -> None:
    for name in ("CONTAINERS_CONF", "CONTAINER_HOST", "DOCKER_HOST", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE"):
        assert containers.steers(name)
    assert not containers.steers("MODEL") and not containers.steers("CUDA_VISIBLE_DEVICES")
