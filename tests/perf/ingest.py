"""Telemetry at the size of an estate: 1,250 agents of 8 GPUs, each on its own WebSocket, a sample each 10 s, into the
real database through the real web process.

Latency is from the moment a sample bears to its acknowledgement at the agent, which is sent after the commit: so it
holds the way back, too. CPU is that of our own web process while 1,000 rows a second come; heartbeats (each agent each
5 s) are told apart, and so is PostgreSQL. The peak gives messages of 500 rows, as spools bring after an absence, to the
sink of the agents' socket in a process that does nothing else: parsed, checked, committed, told to Redis.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any

from tests.perf._agents import Agent, frame, samples
from tests.perf._database import fresh_database

AGENTS, GPUS, EVERY_S = 1250, 8, 10.0
WARM_S, MEASURED_S = 10.0, 20.0
PEAK_MESSAGES, PEAK_ROWS, PEAK_AGENTS = 200, 500, 40


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of these processes so far."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def postgres() -> list[int]:
    """Processes of this measurement's own database: they work in its data folder."""
    mine = urllib.parse.parse_qs(urllib.parse.urlsplit(os.environ["DATABASE_URL"]).query)
    folder = str(Path(urllib.parse.unquote(mine["host"][0])).parents[0]) if "host" in mine else ""
    found = []
    for item in Path("/proc").iterdir():
        if item.name.isdecimal():
            try:
                if (item / "comm").read_text().strip() == "postgres" and os.readlink(item / "cwd").startswith(
                    folder
                ):
                    found.append(int(item.name))
            except OSError:
                continue
    return found


def fleet(agents: int) -> tuple[list[str], list[list[str]]]:
    """Nodes with tokens and cards; returns the tokens and the UUIDs of each node."""
    from pool.models import AgentToken, Cluster, Gpu, Node, Site

    site = Site.objects.create(code="perf", name="Perf")
    cluster = Cluster.objects.create(code="perf", name="Perf", site=site)
    nodes = Node.objects.bulk_create(
        Node(name=f"n{n:05d}", cluster=cluster, health="ok", cpu_milli=128_000, memory_mib=1_000_000)
        for n in range(agents)
    )
    uuids = [[f"GPU-{n:08x}-0000-4000-8000-{g:012x}" for g in range(GPUS)] for n in range(agents)]
    Gpu.objects.bulk_create(
        [
            Gpu(uuid=uuid, node=node, index=index, model_name="NVIDIA H800", memory_mib=81559)
            for node, mine in zip(nodes, uuids, strict=True)
            for index, uuid in enumerate(mine)
        ],
        batch_size=2000,
    )
    tokens = [f"gpn_perf{n}" for n in range(agents)]
    AgentToken.objects.bulk_create(
        AgentToken(node=node, hash=hashlib.sha256(token.encode()).hexdigest())
        for node, token in zip(nodes, tokens, strict=True)
    )
    return tokens, uuids


async def _connect(port: int, tokens: list[str], acked: Any) -> list[Agent]:
    loop = asyncio.get_running_loop()
    agents: list[Agent] = []
    for first in range(0, len(tokens), 25):
        group = []
        for token in tokens[first : first + 25]:
            _, agent = await loop.create_connection(
                lambda token=token: Agent(token, acked), "127.0.0.1", port
            )
            group.append(agent)
        for agent in group:
            while not agent.upgraded:
                await asyncio.sleep(0.002)
            agent.say(
                {"t": "hello", "machine_id": "", "hostname": "", "gpus": [], "facts": {"nvml": {"ok": False}}}
            )
        assert all([await asyncio.wait_for(agent.welcomed, 60) for agent in group])
        agents += group
    return agents


async def _load(
    port: int, tokens: list[str], uuids: list[list[str]], pid: int
) -> dict[str, dict[str, float]]:
    """Figures without and with heartbeats, over the same connections."""
    sent: dict[int, float] = {}
    waits: list[float] = []

    def acked(seq: int) -> None:
        began = sent.pop(seq, None)
        if began is not None:
            waits.append(time.time() - began)

    began = time.monotonic()
    agents = await _connect(port, tokens, acked)
    found = {"connecting": {"s": time.monotonic() - began}}
    for name in ("", "_with_heartbeats"):
        found[name] = await _phase(agents, uuids, pid, sent, waits, beats=bool(name))
    for agent in agents:
        agent.transport.close()
    return found


async def _phase(
    agents: list[Agent],
    uuids: list[list[str]],
    pid: int,
    sent: dict[int, float],
    waits: list[float],
    *,
    beats: bool,
) -> dict[str, float]:
    beat = frame(b'{"t":"heartbeat"}')
    seq = int(time.time() * 1000)
    began = time.monotonic()
    start: tuple[float, float, float] | None = None
    number = 0
    while time.monotonic() - began < WARM_S + MEASURED_S:
        pause = began + number * EVERY_S / len(agents) - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        if start is None and time.monotonic() - began > WARM_S:
            start = (time.monotonic(), cpu_seconds([pid]), cpu_seconds(postgres()))
            waits.clear()
        which = number % len(agents)
        seq += 1
        sent[seq] = time.time()
        text = json.dumps(samples(uuids[which], seq, util=number % 100), separators=(",", ":"))
        agents[which].transport.write(frame(text.encode()))
        if beats:
            agents[which].transport.write(beat)
            agents[(which + len(agents) // 2) % len(agents)].transport.write(beat)
        number += 1
    assert start is not None
    span = time.monotonic() - start[0]
    web, database = cpu_seconds([pid]) - start[1], cpu_seconds(postgres()) - start[2]
    ordered = sorted(waits)
    deadline = time.monotonic() + 20
    while sent and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return {
        "own_cpu{}_core_pct": round(web / span * 100, 1),
        "postgres_cpu{}_core_pct": round(database / span * 100, 1),
        "sample_to_database{}_p50_s": round(ordered[len(ordered) // 2], 3),
        "sample_to_database{}_p95_s": round(ordered[int(len(ordered) * 0.95)], 3),
        "sample_to_database{}_worst_s": round(ordered[-1], 3),
        "rows{}_per_s": round(len(ordered) * GPUS / span),
        "unanswered{}": len(sent),
    }


def _peak(uuids: list[list[str]]) -> tuple[float, float]:
    """Rows a second, and own microseconds of processor a row, of messages of 500 rows: 8 cards at 62 instants."""
    from monitoring.live.ingest_sink import samples_sink
    from pool.models import Node

    nodes = list(Node.objects.order_by("id").values_list("pk", flat=True))
    texts = []
    now = time.time()
    for number in range(PEAK_MESSAGES):
        rows: list[Any] = []
        instant = 0
        while len(rows) < PEAK_ROWS:
            instant += 1
            rows += samples(uuids[number], 1, at=now - 1200 + instant * 10)["rows"]
        texts.append(
            json.dumps({"t": "samples", "seq": number, "rows": rows[:PEAK_ROWS]}, separators=(",", ":"))
        )

    async def agent(first: int) -> None:
        for number in range(first, PEAK_MESSAGES, PEAK_AGENTS):
            assert await samples_sink(nodes[number], json.loads(texts[number])) == {}

    async def give() -> None:
        await asyncio.gather(*(agent(first) for first in range(PEAK_AGENTS)))

    began, used = time.perf_counter(), time.process_time()
    asyncio.run(give())
    rows = PEAK_MESSAGES * PEAK_ROWS
    return rows / (time.perf_counter() - began), (time.process_time() - used) / rows * 1e6


def run() -> dict[str, Any]:
    """CPU in percent of one core, seconds, rows per second."""
    with fresh_database():
        return _measure()


def _measure() -> dict[str, Any]:
    import structlog
    from django.db import connection

    from tests.perf._wall_scale import web_process

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    tokens, uuids = fleet(AGENTS)
    figures: dict[str, float] = {}
    with web_process("") as web:
        found = asyncio.run(_load(web.port, tokens, uuids, web.pid))
    figures["agents_connected_per_s"] = round(AGENTS / found.pop("connecting")["s"], 1)
    for more, got in found.items():
        figures |= {name.format(more): value for name, value in got.items()}
    rate, used = _peak(uuids)
    figures |= {"peak_rows_per_s": round(rate), "peak_own_cpu_us_per_row": round(used, 1)}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
            "WHERE inhparent = 'monitoring_gpusample'::regclass"
        )
        size = int(cursor.fetchone()[0])
        cursor.execute("SELECT count(*) FROM monitoring_gpusample")
        figures["raw_bytes_per_row"] = round(size / int(cursor.fetchone()[0]))
    return {
        "sizes": {"agents": AGENTS, "gpus": AGENTS * GPUS, "every_s": EVERY_S, "peak_batch_rows": PEAK_ROWS},
        "figures": figures,
        "aims": {
            "own_cpu_core_pct": ["<", 35],
            "sample_to_database_p95_s": ["<", 1],
            "peak_rows_per_s": [">=", 20_000],
        },
    }
