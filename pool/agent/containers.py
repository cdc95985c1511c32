"""Container images on a plain node: podman without a daemon, devices by CDI, as the person's own account.

What the container sees: the work folder at the same path and as its working folder, the leased devices alone, the
variables of the job. Its processes stay below the job's shim, so that a stop reaches them as it reaches a command's.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from typing import Any, Iterable

PROGRAM = "podman"
KIND = "nvidia.com/gpu"
FOLDERS = ("/etc/cdi", "/var/run/cdi")
MESSAGE_QUEUES = "/dev/mqueue"
HYBRID_CGROUPS = "/sys/fs/cgroup/unified"
PRIVATE_SHM = "8g"
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,299}")
NOT_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LD_PRELOAD", "LD_LIBRARY_PATH", "TMPDIR")
STEERS = ("CONTAINER", "PODMAN", "DOCKER", "XDG_", "REGISTRY_", "STORAGE_", "BUILDAH", "NOTIFY_", "DBUS_")


class NoContainers(Exception):
    """The image cannot be run here; ``code`` is stable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def program() -> str | None:
    """Podman on this node."""
    return shutil.which(os.environ.get("GPUPOOL_PODMAN") or PROGRAM)


def devices() -> set[str]:
    """Names of NVIDIA devices that CDI files of this node define (YAML or JSON: their names are read as text)."""
    names: set[str] = set()
    folders = os.environ.get("GPUPOOL_CDI_DIRS", ":".join(FOLDERS)).split(":")
    for folder in folders:
        for path in glob.glob(os.path.join(folder, "*")):
            try:
                with open(path, encoding="utf-8", errors="replace") as handle:
                    text = handle.read(4 * 1024 * 1024)
            except OSError:
                continue
            if KIND in text:
                names |= set(
                    re.findall(r"^[\s\-{\"]*name\"?\s*:\s*\"?([A-Za-z0-9_.:-]+)\"?", text, re.MULTILINE)
                )
    return names


def capability() -> dict[str, Any]:
    """Whether images run here, and what is missing."""
    if program() is None:
        return {"ok": False, "reason": "no_podman"}
    if not devices():
        return {"ok": False, "reason": "no_cdi"}
    return {"ok": True, "reason": None}


def device_names(spec: dict[str, Any], indexes: dict[str, int]) -> list[str]:
    """The CDI names of the leased devices: by UUID, else by the card's index."""
    wanted = [str(uuid) for uuid in spec.get("mig_uuids") or spec.get("gpu_uuids") or []]
    known = devices() if wanted else set()
    names = []
    for uuid in wanted:
        index = str(indexes.get(uuid, "-"))
        name = uuid if uuid in known else index if index in known and not spec.get("mig_uuids") else None
        if name is None:
            raise NoContainers("cdi_device_missing", f"no CDI file names {uuid}; run nvidia-ctk cdi generate")
        names.append(f"{KIND}={name}")
    return names


def command(
    spec: dict[str, Any], name: str, work_dir: str, environment: Iterable[str], indexes: dict[str, int]
) -> list[str]:
    """The command line that runs the image of a job."""
    found = program()
    if found is None:
        raise NoContainers("containers_missing", "podman is not on this node")
    image = str(spec.get("image") or "")
    if not IMAGE.fullmatch(image):
        raise NoContainers("image_refused", f"{ascii(image[:100])} is not an image name")
    # Processes of the host's own table: signals reach them as they reach a command's, NVML's pids are theirs, and a
    # port is known as the job's. Shared memory of the host is what MPS and NCCL go by, where podman can give it.
    words = [found, "--cgroup-manager", "cgroupfs"]  # the account has no session of systemd
    if os.path.isdir(HYBRID_CGROUPS) and shutil.which("runc"):
        words += ["--runtime", "runc"]  # crun refuses such a host
    words += ["run", "--rm", "--name", name, "--network", "host", "--pid", "host"]
    words += ["--ipc", "host"] if os.path.isdir(MESSAGE_QUEUES) else ["--shm-size", PRIVATE_SHM]
    words += ["--security-opt", "no-new-privileges", "--cap-drop", "all", "--userns", "keep-id"]
    words += ["--volume", f"{work_dir}:{work_dir}", "--workdir", work_dir]
    for pipe in spec.get("container_folders") or []:
        words += ["--volume", f"{pipe}:{pipe}"]
    for device in device_names(spec, indexes):
        words += ["--device", device]
    for variable in sorted(set(environment)):
        if variable not in NOT_PASSED and not variable.startswith(STEERS):
            words += [
                "--env",
                variable,
            ]  # without a value: taken from podman's own environment, not shown to others
    words.append(image)
    if spec.get("command"):
        words += ["/bin/sh", "-c", str(spec["command"])]
    return words


def steers(name: str) -> bool:
    """Whether a person's variable would change what podman itself does."""
    return name.startswith(STEERS)
