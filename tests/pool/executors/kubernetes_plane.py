"""A real Kubernetes control plane for tests: etcd, API server (TLS, tokens, RBAC), controller manager, scheduler.

Everything listens on the loopback, lives in one folder, and ends with ``stop``. There is no kubelet: see
`kubernetes_kubelet`.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from tests.native import k8s

ADMIN_TOKEN = "the-administrator-of-the-tests"
CONTROLLERS = ",".join(
    (
        "job",
        "namespace",
        "garbagecollector",
        "resourcequota",
        "serviceaccount",
        "serviceaccount-token",
        "endpoint",
    )
    + ("podgc", "disruption")
)
PATIENCE_S = 90.0


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


class Authority:
    """A certificate authority in a folder."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.certificate = self._sign(self.name, self.key, x509.BasicConstraints(True, None), [])

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        basic: x509.BasicConstraints,
        names: list[x509.GeneralName],
        days: int = 2,
    ) -> x509.Certificate:
        at = dt.datetime.now(dt.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(at - dt.timedelta(days=1))
            .not_valid_after(at + dt.timedelta(days=days))
            .add_extension(basic, critical=True)
        )
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self.key, hashes.SHA256())

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def pair(self, folder: Path, name: str, organisation: str = "", days: int = 2) -> tuple[Path, Path]:
        """Certificate and key in files, good for 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        who = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organisation:
            who.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        made = self._sign(x509.Name(who), key, x509.BasicConstraints(False, None), names, days)
        certificate, key_file = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(_pem(key))
        return certificate, key_file


class Plane:
    """One control plane."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.etcd = free_port(), free_port()
        self.authority = Authority()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.crt").write_text(self.authority.pem)
        self.serving = self.authority.pair(folder, "kube-apiserver")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "sa.key").write_bytes(_pem(key))
        (folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,1,system:masters\n")
        (folder / "kubeconfig").write_text(self.kubeconfig(ADMIN_TOKEN))

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def kubeconfig(self, token: str, port: int | None = None) -> str:
        """One with everything inline, for this token."""
        data = base64.b64encode(self.authority.pem.encode()).decode()
        cluster = {"server": f"https://127.0.0.1:{port or self.port}", "certificate-authority-data": data}
        return json.dumps(  # JSON is YAML
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "tests",
                "clusters": [{"name": "tests", "cluster": cluster}],
                "users": [{"name": "user", "user": {"token": token}}],
                "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "user"}}],
            }
        )

    def start(self) -> None:
        """All programs, once the API server is ready."""
        self._run(
            "etcd",
            "etcd",
            *("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", f"http://127.0.0.1:{self.etcd}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{self.etcd}"),
            *(
                "--listen-peer-urls",
                "http://127.0.0.1:0",
                "--initial-advertise-peer-urls",
                "http://127.0.0.1:0",
            ),
            *("--initial-cluster", "default=http://127.0.0.1:0"),
        )
        self._wait(self._healthy, "etcd")
        self.start_api()
        self.start_others()

    def start_others(self) -> None:
        """Controller manager and scheduler, those that do not run: a fresh one ends when its API server goes."""
        for name in ("kube-controller-manager", "kube-scheduler"):
            if name in self.processes and self.processes[name].poll() is None:
                continue
            more = []
            if name == "kube-controller-manager":
                more = [
                    f"--controllers={CONTROLLERS}",
                    "--service-account-private-key-file=sa.key",
                    "--root-ca-file=ca.crt",
                    "--concurrent-gc-syncs=2",
                ]
            self._run(
                name,
                str(k8s.folder() / name),
                "--kubeconfig=kubeconfig",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--secure-port=0",
                "--port=0",
                *more,
            )

    def start_api(self) -> None:
        """The API server alone."""
        certificate, key = self.serving
        self._run(
            "kube-apiserver",
            str(k8s.folder() / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self.etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            "--client-ca-file=ca.crt",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--service-account-key-file=sa.key",
            "--service-account-signing-key-file=sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        self._wait(self._ready, "kube-apiserver")

    def kill_api(self) -> None:
        """The API server ends at once, as by a crash."""
        process = self.processes.pop("kube-apiserver")
        process.kill()
        process.wait()

    def _healthy(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.etcd}/health", timeout=2) as answer:
            return bool(answer.status == 200)

    def _ready(self) -> bool:
        context = ssl.create_default_context(cadata=self.authority.pem)
        request = urllib.request.Request(
            f"{self.server}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=2, context=context) as answer:
            return bool(answer.status == 200)

    def _run(self, name: str, *command: str) -> None:
        # In the group of the test run, so that they end with it however it ends.
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
            )

    def _wait(self, holds: Callable[[], bool], name: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if holds():
                    return
            if self.processes[name].poll() is not None:
                tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} ended: {tail}")
            if time.monotonic() > until:
                raise TimeoutError("the control plane did not come up")
            time.sleep(0.05)

    def stop(self) -> None:
        """End every program that this started."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if process.args[0] == "etcd" else signal.SIGKILL)  # type: ignore[index]
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()
