"""Shell, copies and ports of a lease through the installation, for its holder alone."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pool.agent import channel, procs, ws
from pool.models import Allocation, AllocationEvent, Node
from pool.services.enrolment import enrolment_code_create, enrolment_redeem
from portal.accounts.models import User
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent
from tests.pool.agent.builders import output
from tests.pool.agent.conftest import PATIENCE, Site, wait_for
from tests.pool.client.conftest import Laptop
from tests.portal.builders import token_of
from tests.quotas import build as quota

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]

SERVER = """
import http.server, os
os.makedirs("site", exist_ok=True)
open("site/index.html", "w").write("hello from " + os.environ["GPUPOOL_ALLOCATION"])
os.chdir("site")
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print("port", server.server_address[1], flush=True)
server.serve_forever()
"""


def serving(laptop: Laptop) -> tuple[str, Allocation, int]:
    """(reference, allocation, port) of work that listens."""
    laptop.write("serve.py", SERVER)
    code, out, err = laptop.call("run", "--detach", "--time", "30m", "--", "python3", "serve.py")
    assert code == 0, err
    allocation = wait_for(lambda: Allocation.objects.filter(state="running").first())
    member = allocation.members.get()
    text = wait_for(lambda: "port " in output(member) and output(member))
    return out.strip(), allocation, int(text.split("port ")[1].split()[0])


def order(site: Site, token: str, uid: Any, sent: dict[str, Any]) -> tuple[str, int]:
    """(code, close code) of a session that is refused; ("joined", 0) where it is not."""

    async def ask() -> tuple[str, int]:
        url = f"ws://127.0.0.1:{site.port}/client/ws/{uid}/"
        connection = await ws.connect(url, {"Authorization": f"Bearer {token}"})
        try:
            await connection.send_bytes(channel.ORDER + json.dumps(sent).encode())
            said = ""
            while True:
                message = json.loads(await asyncio.wait_for(connection.receive(), PATIENCE))
                if message["t"] == "joined":
                    return "joined", 0
                said = message["code"]
        except ws.Closed as closed:
            return said, closed.code
        finally:
            connection.abort()

    return asyncio.run(ask())


def test_a_shell_copies_and_a_port_reach_the_lease_and_end_with_it(laptop: Laptop, pool: Node) -> None:
    ref, allocation, port = serving(laptop)
    # A shell: the job's account, folder and cards, and its exit code.
    shell = "id -un; pwd; echo $CUDA_VISIBLE_DEVICES; exit 7"
    code, out, err = laptop.call("shell", ref, "--", "sh", "-c", shell)
    words = out.replace("\r", "").split()
    assert code == 7, err
    assert words[0] == ("nobody" if os.geteuid() == 0 else words[0]) and words[1].endswith(
        allocation.request.uid.hex[-8:]
    )
    assert words[2] == allocation.leases.get().gpu.uuid
    # Files both ways.
    laptop.write("more/a.txt", "from here")
    assert laptop.call("cp", "more", f"{ref}:given")[0] == 0
    assert laptop.call("shell", "--", "cat", "given/a.txt")[1] == "from here"
    (laptop.folder / "back").mkdir()
    assert laptop.call("cp", f"{ref}:site", "back")[0] == 0
    assert (laptop.folder / "back/site/index.html").read_text() == f"hello from {allocation.uid}"
    code, _out, err = laptop.call("cp", f"{ref}:../../etc/passwd", "back")
    assert code == 1 and "[path_outside]" in err
    code, _out, err = laptop.call("cp", f"{ref}:nothing", "back")
    assert code == 1 and "[no_such_file]" in err
    # A port, by several connections at once.
    forward = laptop.start("port-forward", ref, f"0:{port}")
    assert forward.stderr is not None
    here = int(forward.stderr.readline().split("127.0.0.1:")[1].split()[0])
    for _ in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{here}/", timeout=PATIENCE) as answer:
            assert answer.read().decode() == f"hello from {allocation.uid}"
    # What is left in the background goes on; it all ends with the lease.
    assert (
        laptop.call("shell", ref, "--", "sh", "-c", "nohup sleep 321 >/dev/null 2>&1 & sleep 0.5; echo left")[
            0
        ]
        == 0
    )
    sleeper = laptop.start("shell", ref, "--", "sh", "-c", "echo up; trap '' HUP TERM; sleep 300")
    assert sleeper.stdout is not None and "up" in sleeper.stdout.readline()
    mark = f"{allocation.uid}/0"

    def kept() -> int:
        mine = [pid for pid in procs.pids() if procs.environment_marker(pid) == mark]
        return sum(procs.name_of(pid) == "sleep" for pid in mine)

    wait_for(lambda: kept() == 2)
    assert laptop.call("release", ref)[0] == 0
    wait_for(lambda: Allocation.objects.filter(state="ended").exists())
    wait_for(lambda: forward.poll() is not None and sleeper.poll() is not None)
    wait_for(lambda: not [pid for pid in procs.pids() if procs.environment_marker(pid) == mark])
    kinds = AllocationEvent.objects.filter(kind="remote_opened").values_list("facts__kind", flat=True)
    assert set(kinds) == {"shell", "put", "get", "forward"}
    assert AuditEvent.objects.filter(action="remote.opened").count() == len(kinds)


def test_only_the_holder_with_a_token_for_it_gets_in_and_only_to_ports_of_the_job(
    laptop: Laptop, pool: Node, site: Site, lin: User, gpupool: Path, tmp_path: Path
) -> None:
    ref, allocation, port = serving(laptop)
    uid, shell = allocation.uid, {"kind": "shell"}
    chief = quota.user("chief")
    quota.role(chief, "pool_admin")
    stranger = quota.user("stranger", home=lin.home_department)
    assert order(site, token_of(chief, "read", "request", "admin"), uid, shell) == ("not_yours", 4403)
    assert order(site, token_of(stranger, "read", "request"), uid, shell) == ("not_found", 4403)
    assert order(site, token_of(lin, "read"), uid, shell) == ("forbidden", 4403)
    assert order(site, "gpp_nonsense", uid, shell) == ("token_invalid", 4401)
    mine = token_of(lin, "read", "request")
    for sent, code in (
        ({"kind": "exec"}, "invalid"),
        ({"kind": "shell", "user": "root"}, "invalid"),
        ({"kind": "shell", "member": 3}, "invalid"),
        ({"kind": "shell", "argv": ["a\0b"]}, "invalid"),
        ({"kind": "forward"}, "invalid"),
        ({"kind": "forward", "port": 70000}, "invalid"),
    ):
        assert order(site, mine, uid, sent) == (code, 4403), sent
    assert order(site, mine, uuid4(), shell) == ("not_found", 4403)
    assert not AuditEvent.objects.filter(action="remote.opened").exists()
    # A port that listens on the node but belongs to somebody else is not reached.
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        forward = laptop.start("port-forward", ref, f"0:{other.getsockname()[1]}")
        assert forward.stderr is not None
        here = int(forward.stderr.readline().split("127.0.0.1:")[1].split()[0])
        with socket.create_connection(("127.0.0.1", here), PATIENCE) as probe:
            assert probe.recv(10) == b""
        assert "port_not_of_job" in forward.stderr.readline()
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.accept()
    # What belongs to the work folder is never left through a link that lies in it.
    assert laptop.call("shell", ref, "--", "ln", "-s", "/etc", "out")[0] == 0
    code, _out, err = laptop.call("cp", f"{ref}:out/passwd", ".")
    assert code == 1 and "[no_such_file]" in err
    laptop.write("evil.txt", "x")
    code, _out, err = laptop.call("cp", "evil.txt", f"{ref}:out")
    assert code == 1 and "[path_outside]" in err and not os.path.exists("/etc/evil.txt")
    assert laptop.call("release", ref)[0] == 0


def test_another_nodes_agent_cannot_take_a_session(laptop: Laptop, pool: Node, site: Site, lin: User) -> None:
    _ref, allocation, _port = serving(laptop)
    code = enrolment_code_create(acting_user=SYSTEM, node_name="other")
    other = enrolment_redeem(code=code, hostname="other", machine_id="m-other", facts={})
    taken: list[str] = []

    async def steal(session: str, token: str) -> str:
        url = f"ws://127.0.0.1:{site.port}/agent/remote/{session}/"
        connection = await ws.connect(url, {"Authorization": f"Bearer {token}"})
        message = json.loads(await asyncio.wait_for(connection.receive(), PATIENCE))
        connection.abort()
        return str(message["code"])

    from django.core.cache import cache

    session = str(uuid4())
    cache.set(f"remote:{session}", {"node_id": pool.pk, "person": "specific.nobody"}, 30)
    taken.append(asyncio.run(steal(session, other.token)))
    taken.append(asyncio.run(steal(str(uuid4()), other.token)))
    taken.append(asyncio.run(steal(session, "gpn_wrong")))
    assert taken == ["session_of_another_node", "session_unknown", "token_unknown"]
    assert cache.get(f"remote:{session}") is not None  # the right node may still come
    assert laptop.call("release", "R-" + str(allocation.request_id))[0] == 0


def test_a_node_that_is_away_is_said_so(laptop: Laptop, pool: Node, online: Any) -> None:
    ref, _allocation, _port = serving(laptop)
    online.end()
    Node.objects.update(last_heartbeat_at="2020-01-01T00:00:00Z")
    code, _out, err = laptop.call("shell", ref)
    assert code == 1 and "[node_away]" in err
    online.start()
    assert laptop.call("release", ref)[0] == 0
