"""Posts to checkpoint addresses: signed, and never into the network unless an administrator allowed it."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pool.models import ReclaimCase
from pool.services.hook_post import AddressRefused, allowed_address, hook_secret, post_hook
from pool.services.ladder import case_begin
from portal.notify.services.signing import SIGNATURE, TIMESTAMP, signature
from portal.ops.actor import SYSTEM
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, kinds, running
from tests.quotas import build


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what it was sent and answers as told."""

    got: list[tuple[str, dict[str, str], bytes]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).got.append((self.path, dict(self.headers), body))
        self.send_response(type(self).status)
        self.send_header("Location", "http://192.0.2.1/")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def receiver() -> Iterator[Any]:
    Receiver.got, Receiver.status = [], 200
    server = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/save?run=7"  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    server.server_close()


def post(url: str) -> Any:
    return post_hook(url=url, secret="s3cret", body={"event": "checkpoint"}, delivery="d-1", timeout_s=5)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.7", "192.168.1.1", "172.16.0.1", "169.254.169.254", "::1", "fd00::1", "0.0.0.0",
     "::ffff:10.0.0.7", "100.64.0.1", "224.0.0.1"],
)  # fmt: skip
def test_addresses_inside_are_refused(host, settings):
    settings.GPUPOOL_HOOK_ALLOW = []
    with pytest.raises(AddressRefused):
        allowed_address(host, 80)


def test_public_ones_pass_and_inside_ones_by_name_suffix_or_network(settings, monkeypatch):
    def resolve(host: str, *_args: Any, **_kwargs: Any) -> list[Any]:
        known = {
            "save.lab.example": "10.1.2.3",
            "public.example": "93.184.216.34",
            "both.example": "10.9.9.9",
        }
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    settings.GPUPOOL_HOOK_ALLOW = [".lab.example", "10.9.0.0/16", "not a network"]
    assert allowed_address("public.example", 80) == "93.184.216.34"
    assert allowed_address("save.lab.example", 80) == "10.1.2.3"
    assert allowed_address("both.example", 80) == "10.9.9.9"
    with pytest.raises(AddressRefused):
        allowed_address("10.8.0.1", 80)


def test_a_post_is_signed_and_goes_nowhere_else(receiver, settings):
    settings.GPUPOOL_HOOK_ALLOW = ["127.0.0.1"]
    answer = post(receiver.url)
    assert (answer.ok, answer.later, answer.text) == (True, False, "200")
    ((path, headers, body),) = Receiver.got
    assert (path, json.loads(body)) == ("/save?run=7", {"event": "checkpoint"})
    assert headers[SIGNATURE] == signature("s3cret", headers[TIMESTAMP], body)
    Receiver.status = 302
    assert post(receiver.url).ok is False
    Receiver.status = 202
    assert (post(receiver.url).ok, post(receiver.url).later) == (False, True)
    assert len(Receiver.got) == 4


def test_nonsense_and_refusals_are_answers_not_errors(receiver, settings):
    settings.GPUPOOL_HOOK_ALLOW = []
    refused = post(receiver.url)
    assert (refused.ok, refused.text, Receiver.got) == (False, "not a public address: 127.0.0.1", [])
    for url in (
        "",
        "ftp://x/",
        "http://",
        "http://u:p@127.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://\x00/",
    ):
        assert post(url).ok is False


@pytest.mark.django_db(transaction=True)
def test_the_ladder_posts_waits_for_the_answer_and_stops(receiver, settings):
    settings.GPUPOOL_HOOK_ALLOW = ["127.0.0.0/8"]
    with at(0):
        team, h800 = build.department("vg"), build.flavour("h800", installed=None)
        pool.node(h800)
        build.limits(team, h800, 8)
        one = running(team, h800, 1, checkpoint={"url": receiver.url, "seconds": 300})
        case_begin(
            acting_user=SYSTEM, allocation_id=one.pk, cause="maintenance", rule="r", reason="new supply"
        )
    ((_path, headers, body),) = Receiver.got
    told = json.loads(body)
    case = case_of(one)
    assert told["case"] == str(case.uid) and told["seconds"] == 300 and told["cause"] == "maintenance"
    secret = hook_secret(str(one.request.uid))
    assert headers[SIGNATURE] == signature(secret, headers[TIMESTAMP], body)
    one.refresh_from_db()
    assert (one.state, case.step, case.checkpoint_result["all"]["ok"]) == ("stopping", "stopping", True)
    assert kinds(one).count("checkpoint_done") == 1
    Receiver.status = 500
    with at(10):
        other = running(team, h800, 1, checkpoint={"url": receiver.url, "seconds": 300})
        case_begin(acting_user=SYSTEM, allocation_id=other.pk, cause="maintenance", rule="r")
    failed = case_of(other)
    assert (failed.step, failed.checkpoint_result["all"]) == (
        "checkpoint", {"ok": False, "detail": "500", "exit_code": None},
    )  # fmt: skip
    Receiver.status = 202
    with at(20):
        third = running(team, h800, 1, checkpoint={"url": receiver.url, "seconds": 300})
        case_begin(acting_user=SYSTEM, allocation_id=third.pk, cause="maintenance", rule="r")
    assert (case_of(third).step, ReclaimCase.objects.count()) == ("checkpoint", 3)
