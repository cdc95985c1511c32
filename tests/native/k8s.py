"""Where the real Kubernetes programs of the tests lie, and how they come there (`python tests/native/k8s.py`).

They are built once, kept in the user's cache folder (`GPUPOOL_TEST_K8S` names another) under the mark of how they are
built, and used by every later run. This file needs nothing but Python's own library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
# (what to look for, Debian package)
BUILD_PARTS = (("go", "golang-go"), ("patch", "patch"), ("xz", "xz-utils"))
RUN_PARTS = (("etcd", "etcd-server"),)
PATIENCE_S = 30 * 60


def folder() -> Path:
    """The folder of the programs, made or not."""
    named = os.environ.get("GPUPOOL_TEST_K8S")
    if named:
        return Path(named)
    how = b"".join((HERE / name).read_bytes() for name in ("k8s_build.sh", "k8s_main.go"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gpupool-tests" / f"kubernetes-{hashlib.sha256(how).hexdigest()[:12]}"


def built() -> bool:
    """Whether all programs are there."""
    return all((folder() / name).exists() for name in PROGRAMS)


def can_build() -> bool:
    """Whether this machine has what the build needs."""
    return all(shutil.which(part) for part in ("apt-get", *(part for part, _ in BUILD_PARTS)))


def lacking() -> str:
    """What is missing to run them, as a sentence; empty where nothing is."""
    if shutil.which("etcd") is None:
        return "etcd is not installed"
    if not built():
        return "no Kubernetes programs: python tests/native/k8s.py builds them in some minutes"
    return ""


def build_in_background(log: Path) -> subprocess.Popen[bytes] | None:
    """Begin the build at the lowest priority; None where it was done before."""
    if built():
        return None
    command = ["nice", "-n", "19", str(HERE / "k8s_build.sh"), str(folder())]
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


if __name__ == "__main__":
    sys.exit(subprocess.run([str(HERE / "k8s_build.sh"), str(folder())], check=False).returncode)
