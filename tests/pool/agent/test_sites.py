"""Two sites with an agent each: a service that rolls between them, one cut off, the installation itself away.

Real agents, real work, a real web process; the line to the first site is a small relay that can be cut. An hour
passes by moving what the database remembers that far into the past, so that every rule judges by the real clock.
"""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from django.db.models import F

from pool.models import (
    AgentCommand,
    Allocation,
    AllocationEvent,
    AllocationMember,
    Cluster,
    Gpu,
    Lease,
    Node,
    ReclaimCase,
    Site,
)
from pool.services.cycle import schedule_cycle
from pool.services.enrolment import enrolment_code_create
from pool.services.execution import allocation_start, execution_reconcile
from pool.services.node_watch import WATCH, listening_since, nodes_sweep
from pool.services.nodes import node_drain
from pool.services.rolling import replicas_roll
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from portal.ops.models import Incident, TaskRun
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest, QuotaUsage
from quotas.services.series import series_follow
from tests.pool import builders
from tests.pool.agent.builders import output
from tests.pool.agent.conftest import (
    FakeNvml,
    Process,
    clean_environment,
    free_port,
    kill_jobs,
    serving,
    wait_for,
)
from tests.pool.agent.conftest import Site as Web
from tests.quotas import build

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]
LIVE = ("reserved", "starting", "running", "stopping")
COUNTS = "trap 'echo told; exit 0' TERM; n=0; while :; do echo $n; n=$((n+1)); sleep 0.2; done"


class Line:
    """A TCP relay to the web process; cut, it answers nobody."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.open: list[socket.socket] = []
        self.listener: socket.socket | None = None
        self.join()

    def join(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        assert self.listener is not None
        with suppress(OSError):  # wakes the thread that waits in accept
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.listener = None
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.open = []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Sites:
    """The nodes by name, the line to ``east``, and the hands of the installation's periodic work."""

    web: Web
    line: Line
    agents: dict[str, Process] = field(default_factory=dict)
    team: Any = None
    flavour: Any = None
    who: Any = None

    def node(self, name: str) -> Node:
        return Node.objects.get(name=name)

    def turn(self) -> None:
        """One round of what beat and workers do."""
        outbox_deliver()
        nodes_sweep(listening=listening_since())
        replicas_roll()
        schedule_cycle()
        for pk in Allocation.objects.filter(state="reserved").values_list("pk", flat=True):
            allocation_start(allocation_id=pk)
        execution_reconcile()
        self.nothing_is_held_twice()

    def until(self, holds: Callable[[], Any]) -> Any:
        """Turn until it holds."""

        def step() -> Any:
            self.turn()
            return holds()

        return wait_for(step, pause=0.2)

    def nothing_is_held_twice(self) -> None:
        """Each card has one open lease at most, and its quota counts what is open."""
        cards = list(Lease.objects.filter(ended_at=None).values_list("gpu_id", flat=True))
        assert len(cards) == len(set(cards))

    def ask(self, command: str, **values: Any) -> CapacityRequest:
        return builders.queued(self.team, self.flavour, 1, self.who, command=command, **values)

    def runs(self, request: CapacityRequest) -> Allocation | None:
        return Allocation.objects.filter(request=request, state="running").order_by("-id").first()


def copies(allocation: Allocation) -> int:
    """Processes of this allocation on this machine that lead a group and are not over."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            mine = process.environ().get("GPUPOOL_ALLOCATION") == str(allocation.uid)
            found += mine and process.status() != psutil.STATUS_ZOMBIE
    return found


def where(allocation: Allocation) -> str:
    return str(AllocationMember.objects.get(allocation=allocation).node.name)


def passes(seconds: float) -> None:
    """So much time goes by: everything that the rules of nodes, orders and fences remember is that much older."""
    gone = timedelta(seconds=seconds)
    for model, names in (
        (Node, ("last_heartbeat_at", "health_since")),
        (Allocation, ("reserved_at", "started_at", "state_since", "stop_asked_at", "grace_until")),
        (AllocationMember, ("started_at", "ended_at", "ordered_at", "stop_ordered_at")),
        (AgentCommand, ("created_at", "acked_at")),
        (ReclaimCase, ("noticed_at", "stop_sent_at", "grace_until")),
    ):
        model.objects.update(**{name: F(name) - gone for name in names})


@pytest.fixture
def site(transactional_db: None, settings: Any) -> Iterator[Web]:
    """All pages: notices name theirs."""
    settings.ALLOWED_HOSTS = ["*"]
    yield from serving()


@pytest.fixture
def sites(site: Web, nvml_library: Path, tmp_path: Path) -> Iterator[Sites]:
    """``east`` behind the line and ``west`` beside the installation, one card each."""
    made = Sites(site, Line(site.port))
    try:
        for name, port in (("east", made.line.port), ("west", site.port)):
            folder = tmp_path / name
            folder.mkdir()
            fake = FakeNvml(nvml_library, folder / "nvml.txt")
            fake.set(count=1, gpu_0_uuid=f"GPU-{name}")
            agent = Process(
                folder / "state", clean_environment(fake.environment), [sys.executable, "-m", "pool.agent"]
            )
            made.agents[name] = agent
            code = enrolment_code_create(acting_user=SYSTEM, node_name=name)
            answer = agent.command(
                "enrol", code, "--url", f"http://127.0.0.1:{port}", "--job-account", "nobody"
            )
            assert answer.returncode == 0, answer.stderr
            Node.objects.update(
                hostname=name, machine_id=""
            )  # else the second code enrols the same machine again
        for agent in made.agents.values():
            agent.start()
        wait_for(lambda: Gpu.objects.count() == 2 and Node.objects.filter(health="ok").count() == 2)
        for name in made.agents:
            place, _ = Site.objects.get_or_create(code=name, defaults={"name": name})
            first = Node.objects.get(name=name).cluster
            cluster = Cluster.objects.create(code=f"c-{name}", name=name, site=place, executor=first.executor)
            Node.objects.filter(name=name).update(cluster=cluster)
        made.team, made.flavour = build.department("vg"), Gpu.objects.first().flavour  # type: ignore[union-attr]
        made.who = build.user("lin", made.team, system_account="nobody")
        build.limits(made.team, made.flavour, 8)
        listening_since()
        with (
            patch("pool.tasks.start_allocation.apply_async"),
            patch("pool.tasks.start_allocations.apply_async"),
        ):
            yield made
    finally:
        if made.line.listener is not None:
            made.line.cut()
        for agent in made.agents.values():
            if agent.process is not None:
                agent.process.kill()
                agent.process.wait()
            kill_jobs(agent.state)
            if agent.state.exists():
                shutil.rmtree(f"/var/tmp/gpupool-work-{agent.state.stat().st_ino}", ignore_errors=True)


def test_a_service_rolls_to_the_other_node_before_it_ends_on_the_drained_one(sites: Sites) -> None:
    head = CapacityRequest.objects.create(
        requester=sites.who, department=sites.team, flavour=sites.flavour, gpus_per_node=1, nodes=1, state="series",
        series="service", is_service=True, replicas_min=1, replicas_max=1, run_kind="command", charge_milli=1000,
        command="sleep 1; touch up; exec sleep 600", review_at=now() + timedelta(days=1), queued_at=now(),
        submitted_at=now(), decided_at=now(),
        health={"kind": "command", "command": "test -e up", "every_s": 0.3, "failures": 3},
    )  # fmt: skip
    series_follow(head_id=head.pk)

    def well(allocation: Allocation) -> AllocationEvent | None:
        return AllocationEvent.objects.filter(allocation=allocation, kind="health_ok").first()

    rows = Allocation.objects.filter(request__head=head).order_by("id")
    sites.until(lambda: rows.exists() and well(rows[0]))
    old = rows[0]
    seen: list[int] = []

    def alive() -> int:
        running = [one for one in rows.filter(state__in=("running", "stopping")) if copies(one)]
        seen.append(len(running))
        return len(running)

    node_drain(acting_user=SYSTEM, node=sites.node(where(old)), reason="fan", grace_s=1800)
    sites.until(lambda: alive() and Allocation.objects.get(pk=old.pk).state == "ended")
    old, new = rows
    assert min(seen) >= 1, "somebody answered at every moment"
    assert {where(old), where(new)} == {"east", "west"}
    answered, stopped = well(new), ReclaimCase.objects.get(allocation=old)
    assert answered is not None and stopped.stop_sent_at is not None
    assert answered.at <= stopped.stop_sent_at <= old.ended_at
    assert (old.end_reason, old.request.state, new.state) == ("maintenance", "ended", "running")
    assert (copies(old), head.members.filter(state__in=["queued", "allocated"]).count()) == (0, 1)


def test_a_site_cut_off_for_an_hour_loses_no_card_to_two_and_its_work_goes_on_elsewhere(sites: Sites) -> None:
    Node.objects.filter(name="west").update(schedulable="cordoned")
    request = sites.ask(COUNTS)
    old = sites.until(lambda: sites.runs(request))
    member = AllocationMember.objects.get(allocation=old)
    wait_for(lambda: "3\n" in output(member))
    card = Gpu.objects.get(node__name="east")
    sites.line.cut()
    passes(130)
    sites.until(lambda: sites.node("east").health == "lost")
    assert Incident.objects.filter(kind="node_lost", closed_at=None).count() == 1
    behind = sites.ask("sleep 600")
    passes(3600 - 130)
    Node.objects.filter(name="west").update(schedulable="open")
    again = sites.until(lambda: sites.runs(request))
    old.refresh_from_db()
    assert (old.state, old.end_reason, where(again)) == ("ended", "node_lost", "west")
    assert copies(old) > 0, "nobody can reach it: it goes on over there"
    # Its card is nobody's: held by the allocation that ended, until somebody sees it free.
    assert Lease.objects.get(gpu=card, ended_at=None).allocation_id == old.pk
    for _ in range(3):
        sites.turn()
    assert not Allocation.objects.filter(request=behind).exists()
    told = output(member)
    sites.line.join()
    taken = sites.until(lambda: sites.runs(behind))
    assert where(taken) == "east" and copies(old) == 0
    member.refresh_from_db()
    free = AllocationMember.objects.get(pk=member.pk).seen_free_at
    assert free is not None and free <= taken.reserved_at, "granted again only after it was seen free"
    text = output(member)
    assert text.startswith(told) and text.rstrip().endswith("told")
    lines = [word for word in text.split() if word.isdigit()]
    assert lines == [str(n) for n in range(len(lines))], "what it wrote meanwhile came once and in order"
    assert Incident.objects.filter(kind="node_lost", closed_at=None).count() == 0
    assert Allocation.objects.filter(request=request).count() == 2
    usage = QuotaUsage.objects.get(department=sites.team, flavour=sites.flavour)
    assert usage.total == 2000 == 1000 * Lease.objects.filter(ended_at=None).count()


def test_an_installation_that_was_off_for_an_hour_finds_its_work_as_it_is(sites: Sites) -> None:
    goes_on, ends = sites.ask(COUNTS), sites.ask("while [ ! -e go ]; do sleep 0.1; done; echo done; exit 7")
    first, second = sites.until(
        lambda: sites.runs(goes_on) and sites.runs(ends) and (sites.runs(goes_on), sites.runs(ends))
    )
    one, two = (AllocationMember.objects.get(allocation=row) for row in (first, second))
    taken = len(sites.web.samples)
    sites.web.stop()
    folder = next(
        process.cwd() for process in psutil.process_iter()
        if _environment(process).get("GPUPOOL_ALLOCATION") == str(second.uid)
    )  # fmt: skip
    Path(folder, "go").touch()
    wait_for(lambda: copies(second) == 0)
    passes(3600)
    TaskRun.objects.filter(name=WATCH).update(
        started_at=F("started_at") - timedelta(hours=1), ended_at=F("ended_at") - timedelta(hours=1)
    )
    waits = sites.ask("sleep 600")
    sites.turn()  # the first round after the start, before any agent was heard
    assert set(Node.objects.values_list("health", flat=True)) == {"ok"}
    assert [Allocation.objects.get(pk=row.pk).state for row in (first, second)] == ["running", "running"]
    assert not Allocation.objects.filter(request=waits).exists()
    sites.web.start()
    sites.until(lambda: sites.runs(waits))
    first.refresh_from_db()
    second.refresh_from_db()
    assert (second.state, second.end_reason, second.exit_code) == ("ended", "failed", 7)
    assert (output(two), first.state, copies(first) > 0) == ("done\n", "running", True)
    assert Allocation.objects.filter(request__in=[goes_on, ends]).count() == 2, "nothing was begun twice"
    before = output(one)
    wait_for(lambda: len(output(one)) > len(before))
    lines = output(one).split()
    assert lines == [str(n) for n in range(len(lines))]
    wait_for(lambda: len(sites.web.samples) > taken)
    for node_id in Node.objects.values_list("pk", flat=True):
        numbers = [message["seq"] for pk, message in sites.web.samples if pk == node_id]
        assert sorted(set(numbers)) == list(dict.fromkeys(numbers)), "samples were spooled and came in order"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}
