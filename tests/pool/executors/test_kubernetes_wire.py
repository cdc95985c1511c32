"""The wire: credentials, refusals, throttling, watches, output and states, on recorded answers of an API server."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlparse

import pytest

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.kubernetes import view as views
from pool.executors.kubernetes.connection import Access, Connection, Problem, access_of, expires_at
from pool.executors.kubernetes.logs import LogReader
from pool.executors.kubernetes.session import failure
from pool.executors.kubernetes.states import departed, is_over, observed
from pool.executors.kubernetes.view import PodView
from portal.kernel.clock import set_clock
from tests.pool.executors.kubernetes_plane import Authority

UID = "0190b3f2-1c00-7000-8000-000000000001"
OURS = f"gp-{UID.replace('-', '')}-0"


class Answers:
    """An HTTPS server that says what a test wants, and remembers what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.says: dict[str, list[tuple[int, dict[str, str], bytes]]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                asked = urlparse(self.path)
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append(
                    (asked.path, {name: one[0] for name, one in parse_qs(asked.query).items()})
                )
                said = outer.says[asked.path]
                code, headers, body = said[0] if len(said) == 1 else said.pop(0)
                since = parse_qs(asked.query).get("sinceTime", [""])[0].rstrip("Z").encode()
                if since:
                    lines = body.splitlines(keepends=True)
                    body = b"".join(line for line in lines if line[:19] >= since)
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = do_PATCH = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.pair(folder, "server"))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, path: str, body: object, code: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.says.setdefault(path, []).append(
            (code, {k.replace("_", "-"): v for k, v in headers.items()}, data)
        )

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_port}"

    def connection(self, **values: str) -> Connection:
        return Connection(Access(server=self.url, ca=self.authority.pem, token="secret", **values))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Answers]:
    made = Answers(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def status(code: int, reason: str = "", message: str = "", *causes: str) -> dict[str, Any]:
    details = {"causes": [{"reason": cause} for cause in causes]}
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


# -- credentials -----------------------------------------------------------------------------------------------


def kubeconfig(user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None) -> str:
    base = {"server": "https://k.example", "certificate-authority-data": base64.b64encode(b"PEM").decode()}
    document = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {**base, **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
    }
    return json.dumps(document)


def test_a_kubeconfig_with_everything_inline() -> None:
    assert access_of(kubeconfig()) == Access(server="https://k.example", ca="PEM", token="t")
    certificate, key = (base64.b64encode(part).decode() for part in (b"C", b"K"))
    inline = {"client-certificate-data": certificate, "client-key-data": key}
    made = access_of(kubeconfig(inline, {"tls-server-name": "k"}))
    assert (made.certificate, made.key, made.server_name) == ("C", "K", "k")


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ({"exec": {"command": "sh"}}, None),
        ({"auth-provider": {"name": "gcp"}}, None),
        ({"tokenFile": "/etc/passwd"}, None),
        ({"client-key": "/root/.ssh/id_rsa"}, None),
        ({"username": "a", "password": "b"}, None),
        (None, {"certificate-authority": "/etc/passwd"}),
        (None, {"insecure-skip-tls-verify": True}),
        (None, {"proxy-url": "http://proxy.example"}),
        (None, {"server": "http://k.example"}),
        (None, {"certificate-authority-data": "no base64!"}),
    ],
)
def test_a_kubeconfig_that_would_run_or_read_something_here(user: Any, cluster: Any) -> None:
    with pytest.raises(TerminalFailure, match="credential_refused"):
        access_of(kubeconfig(user, cluster))


@pytest.mark.parametrize(
    "text", ["", "a: [", "{}", "!!python/object/apply:os.system [id]", "current-context: x"]
)
def test_what_is_no_kubeconfig(text: str) -> None:
    with pytest.raises(TerminalFailure, match="credential_refused"):
        access_of(text)


def jwt(exp: int) -> str:
    part = base64.urlsafe_b64encode(json.dumps({"exp": exp}).encode()).decode().rstrip("=")
    return f"x.{part}.y"


def test_a_credential_says_when_it_ends(tmp_path: Path) -> None:
    assert expires_at(Access("https://x", token=jwt(1_800_000_000))) == datetime(2027, 1, 15, 8, tzinfo=UTC)
    assert expires_at(Access("https://x", token="opaque")) is None
    certificate, key = Authority().pair(tmp_path, "client", days=3)
    end = expires_at(Access("https://x", certificate=certificate.read_text(), key=key.read_text()))
    assert end is not None and 2 < (end - datetime.now(UTC)).total_seconds() / 86400 <= 3


def test_an_ended_token_is_told_apart_from_an_unknown_one(server: Answers) -> None:
    server.say("/api/v1/nodes", status(401), 401)
    over = Connection(Access(server.url, server.authority.pem, token=jwt(1_700_000_000)))
    with pytest.raises(RetryableFailure, match="credential_expired"):
        over.get("/api/v1/nodes")
    with (
        set_clock(datetime(2023, 1, 1, tzinfo=UTC)),
        pytest.raises(RetryableFailure, match="credential_refused"),
    ):
        Connection(Access(server.url, server.authority.pem, token=jwt(1_700_000_000))).get("/api/v1/nodes")


def test_only_the_named_authority_is_believed(server: Answers) -> None:
    server.say("/version", {})
    with pytest.raises(RetryableFailure, match="cluster_away"):
        Connection(Access(server.url, Authority().pem, token="t")).get("/version")
    with pytest.raises(RetryableFailure, match="cluster_away"):
        server.connection(server_name="other.example").get("/version")
    with pytest.raises(TerminalFailure, match="credential_refused"):
        Connection(Access(server.url, "no certificate", token="t"))


def test_a_client_key_leaves_no_file(server: Answers, tmp_path: Path) -> None:
    certificate, key = server.authority.pair(tmp_path, "client")
    server.say("/version", {"gitVersion": "v1"})
    before = set(Path("/tmp").glob("gpupool-*"))
    made = server.connection(certificate=certificate.read_text(), key=key.read_text())
    assert made.get("/version") == {"gitVersion": "v1"}
    assert set(Path("/tmp").glob("gpupool-*")) - before == set()


# -- answers ---------------------------------------------------------------------------------------------------


def test_throttling_is_kept_to(server: Answers) -> None:
    server.say("/version", status(429), 429, Retry_After="30")
    connection = server.connection()
    for _ in range(3):
        with pytest.raises(RetryableFailure, match="throttled"):
            connection.get("/version")
    assert len(server.asked) == 1
    later = patch("time.monotonic", return_value=time.monotonic() + 31)
    with later, pytest.raises(RetryableFailure, match="throttled"):
        connection.get("/version")
    assert len(server.asked) == 2


def test_a_disruption_budget_is_no_throttling(server: Answers) -> None:
    server.say("/e", status(429, "TooManyRequests", "budget", "DisruptionBudget"), 429, Retry_After="30")
    connection = server.connection()
    for _ in range(2):
        with pytest.raises(Problem):
            connection.create("/e", {})
    assert len(server.asked) == 2


def test_a_redirect_is_not_followed(server: Answers) -> None:
    server.say("/version", b"", 302, Location=f"{server.url}/other")
    server.say("/other", {})
    with pytest.raises(Problem) as error:
        server.connection().get("/version")
    assert (error.value.code, [path for path, _ in server.asked]) == (302, ["/version"])


@pytest.mark.parametrize("code", [500, 503, 504])
def test_a_server_in_trouble_is_away(server: Answers, code: int) -> None:
    server.say("/version", b"upstream", code)
    with pytest.raises(RetryableFailure, match="cluster_away"):
        server.connection().get("/version")


@pytest.mark.parametrize(
    ("problem", "kind", "code"),
    [
        (
            Problem(403, "Forbidden", "pods is forbidden: exceeded quota: gpupool"),
            RetryableFailure,
            "quota_there",
        ),
        (Problem(403, "Forbidden", "x", ("NamespaceTerminating",)), RetryableFailure, "namespace_ending"),
        (Problem(403, "Forbidden", 'User "x" cannot create resource'), RetryableFailure, "rights_missing"),
        (Problem(403, "Forbidden", "violates PodSecurity restricted"), TerminalFailure, "refused_there"),
        (Problem(422, "Invalid", "spec"), TerminalFailure, "refused_there"),
        (Problem(404, "NotFound", "x"), RetryableFailure, "not_found_there"),
        (Problem(409, "Conflict", "x"), RetryableFailure, "not_done_there"),
    ],
)
def test_which_refusals_are_for_good(problem: Problem, kind: type[Exception], code: str) -> None:
    made = failure(problem, "doing")
    assert (type(made), made.code) == (kind, code)


# -- the view --------------------------------------------------------------------------------------------------


def pod(name: str, version: int = 1, number: int | None = 0, **status_: Any) -> dict[str, Any]:
    labels = {} if number is None else {"gpupool.io/allocation": UID, "gpupool.io/member": str(number)}
    return {
        "metadata": {
            "name": name,
            "namespace": "a",
            "uid": name,
            "resourceVersion": str(version),
            "labels": {"noise": "x", **labels},
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {
                    "name": "work",
                    "resources": {
                        "requests": {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "2"},
                        "limits": {"nvidia.com/gpu": "2"},
                    },
                }
            ],
        },
        "status": {"phase": "Running", **status_},
    }


def test_pages_then_events_then_anew_after_410(server: Answers) -> None:
    path = views.PODS
    server.say(path, {"metadata": {"resourceVersion": "5", "continue": "more"}, "items": [pod("one")]})
    server.say(path, {"metadata": {"resourceVersion": "5"}, "items": [pod("two", number=None)]})
    events = [
        {"type": "MODIFIED", "object": pod("one", 6, phase="Succeeded")},
        {"type": "ADDED", "object": pod("three", 7)},
        {"type": "DELETED", "object": pod("three", 8)},
        {"type": "DELETED", "object": pod("two", 9, number=None)},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}},
    ]
    server.say(path, "\n".join(map(json.dumps, events)).encode() + b"\n")
    server.say(path, json.dumps({"type": "ERROR", "object": status(410, "Expired")}).encode() + b"\n")
    server.say(path, {"metadata": {"resourceVersion": "20"}, "items": []})
    connection, view = server.connection(), PodView()
    view.refresh(connection)
    assert (set(view.pods), view.version) == ({"a/one", "a/two"}, "5")
    assert view.pods["a/one"]["metadata"]["labels"] == {
        "gpupool.io/allocation": UID,
        "gpupool.io/member": "0",
    }
    assert (view.pods["a/one"]["spec"]["gpus"], view.pods["a/one"]["spec"]["cpu_milli"]) == (2, 500)
    view.refresh(connection)
    assert (set(view.pods), view.version, set(view.gone)) == ({"a/one"}, "12", {"a/three"})
    assert is_over(view.pods["a/one"])
    view.refresh(connection)
    assert (view.pods, view.version, set(view.gone)) == ({}, "20", {"a/three", "a/one"})
    queries = [query for _, query in server.asked]
    assert [query.get("continue") for query in queries[:2]] == [None, "more"]
    assert [query.get("resourceVersion") for query in queries[2:4]] == ["5", "12"]
    assert (view.lists, view.resumes) == (2, 1)


# -- states ----------------------------------------------------------------------------------------------------


def ended(phase: str, why: str = "", **terminated: Any) -> dict[str, Any]:
    state = {"startedAt": "2026-06-01T08:00:00Z", "finishedAt": "2026-06-01T09:00:00Z", **terminated}
    made = {"containerStatuses": [{"name": "work", "state": {"terminated": state}}], "phase": phase}
    return pod("p", **made, **({"reason": why} if why else {}))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (ended("Succeeded", exitCode=0), ("free", 0, None, None, False)),
        (ended("Failed", exitCode=3), ("free", 3, None, None, False)),
        (ended("Failed", exitCode=137), ("free", 137, 9, None, False)),
        (ended("Failed", exitCode=137, reason="OOMKilled"), ("free", 137, 9, "out_of_memory", False)),
        (ended("Failed", "Evicted", exitCode=143), ("free", 143, 15, "evicted_there", False)),
        (ended("Failed", "Preempting", exitCode=143), ("free", 143, 15, "preempted_there", False)),
        (
            pod("p", phase="Failed", reason="UnexpectedAdmissionError"),
            ("free", None, None, "not_admitted", True),  # G108: it holds no card
        ),
        (pod("p", phase="Failed", reason="OutOfnvidia.com/gpu"), ("free", None, None, "not_admitted", True)),
        (
            ended("Failed", exitCode=128, reason="StartError", startedAt="1970-01-01T00:00:00Z"),
            ("free", 128, None, "container_cannot_run", True),
        ),
    ],
)
def test_how_it_ended(made: dict[str, Any], expected: tuple[Any, ...]) -> None:
    seen = observed(made)
    code = (seen.error or {}).get("code")
    assert (seen.state, seen.exit_code, seen.signal, code, seen.failed_start) == expected


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    row = {"name": "work", "state": {"waiting": {"reason": reason, "message": message}}}
    return pod(OURS, phase="Pending", containerStatuses=[row])


def test_what_it_waits_for() -> None:
    assert observed(waiting("ContainerCreating")).detail == "ContainerCreating"
    bad = observed(waiting("ImagePullBackOff", "manifest unknown"))
    assert (bad.state, bad.failed_start, (bad.error or {})["code"]) == ("exited", True, "image_not_pulled")
    assert observed(waiting("ImagePullBackOff", "connection reset")).state == "starting"
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    lost = pod(OURS, phase="Pending", conditions=[condition])
    lost["spec"]["nodeName"] = None
    assert (observed(lost).state, observed(lost).detail) == ("starting", "0/3 nodes are available")


def test_a_pod_that_was_taken_in_runs_on_while_its_containers_begin_again() -> None:
    """Its cards stay its own; one of ours whose container waits is not running."""
    row = {"name": "work", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    theirs = pod("theirs-7d9f", containerStatuses=[row], startTime="2026-06-16T06:00:00Z")
    assert (observed(theirs).state, observed(theirs).external_id) == ("running", "a/theirs-7d9f")
    assert observed(pod(OURS, containerStatuses=[row])).state == "starting"
    theirs["spec"]["nodeName"] = None
    assert observed(theirs).state == "starting"


def test_running_says_since_when_and_on_what() -> None:
    made = pod(
        "p", containerStatuses=[{"name": "work", "state": {"running": {"startedAt": "2026-06-01T08:00:00Z"}}}]
    )
    made["metadata"]["annotations"] = {
        "hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,3000,30:GPU-2,NVIDIA,1,1:;"
    }
    seen = observed(made)
    assert (seen.state, seen.external_id, seen.devices) == ("running", "a/p", ("GPU-1", "GPU-2"))
    assert seen.started_at == datetime(2026, 6, 1, 8, tzinfo=UTC)


def test_a_pod_that_went() -> None:
    begun = pod(
        "p", containerStatuses=[{"name": "work", "state": {"running": {"startedAt": "2026-06-01T08:00:00Z"}}}]
    )
    seen = departed(begun, wanted=True)
    assert (seen.state, seen.failed_start, (seen.error or {})["code"]) == ("free", False, "removed_there")
    assert departed(begun, wanted=False).error is None
    made_room = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    preempted = {**begun, "status": {**begun["status"], "conditions": [made_room]}}
    assert (departed(preempted, wanted=True).error or {})["code"] == "preempted_there"
    assert departed(waiting("ContainerCreating"), wanted=False).failed_start is True
    assert departed(ended("Failed", exitCode=3), wanted=True).exit_code == 3


# -- output ----------------------------------------------------------------------------------------------------

LOG = "/api/v1/namespaces/a/pods/p/log"


def stamped(*lines: tuple[str, str]) -> bytes:
    return "".join(f"2026-06-01T08:00:{second}Z {text}" for second, text in lines).encode()


def test_output_goes_on_where_it_was_left(server: Answers) -> None:
    connection, reader = server.connection(), LogReader()
    server.say(LOG, stamped(("01.1", "one\n"), ("02.1", "two\n"), ("02.5", "three\n")))
    assert reader.read(connection, "a", "p", 0) == b"one\ntwo\nthree\n"
    server.says[LOG] = []
    server.say(LOG, stamped(("02.1", "two\n"), ("02.5", "three\n"), ("02.5", "four\n"), ("03.0", "five\n")))
    assert reader.read(connection, "a", "p", 14) == b"four\nfive\n"
    assert server.asked[-1][1]["sinceTime"] == "2026-06-01T08:00:02Z"
    server.says[LOG] = []
    server.say(LOG, stamped(("03.0", "five\n")))
    assert reader.read(connection, "a", "p", 24) == b""


def test_another_process_skips_what_was_read(server: Answers) -> None:
    server.say(LOG, stamped(("01.1", "one\n"), ("02.1", "two\n")))
    assert LogReader().read(server.connection(), "a", "p", 6) == b"o\n"
    assert "sinceTime" not in server.asked[-1][1]


def test_what_was_rotated_away_is_not_read_twice(server: Answers) -> None:
    reader = LogReader()
    server.say(LOG, stamped(("09.1", "late\n")))
    assert reader.read(server.connection(), "a", "p", 1000) == b""
    server.says[LOG] = []
    server.say(LOG, stamped(("09.1", "late\n"), ("10.1", "new\n")))
    assert reader.read(server.connection(), "a", "p", 1000) == b"new\n"


def test_large_output_comes_in_pieces(server: Answers) -> None:
    reader, connection = LogReader(), server.connection()
    text = [(f"{second:02d}.1", "x" * 9_999 + "\n") for second in range(20)]
    server.say(LOG, stamped(*text))
    got = b""
    while piece := reader.read(connection, "a", "p", len(got)):
        assert len(piece) <= 64 * 1024
        got += piece
    assert got == b"".join(line.encode() for _, line in text)


def test_stamps_inside_a_long_line_are_not_output(server: Answers) -> None:
    stamp = b"2026-06-01T08:00:01.1Z "
    server.say(LOG, stamp + b"x" * 16384 + stamp + b"y\n")
    assert LogReader().read(server.connection(), "a", "p", 0) == b"x" * 16384 + b"y\n"


@pytest.mark.parametrize("code", [400, 404])
def test_no_output_before_it_begins_and_after_it_went(server: Answers, code: int) -> None:
    server.say(LOG, status(code), code)
    assert LogReader().read(server.connection(), "a", "p", 0) == b""
