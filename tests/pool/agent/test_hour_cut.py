"""An hour without the network: the agent keeps what its spool holds, and what it kept is stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from monitoring.models import GpuRollup, GpuSample, GpuState
from monitoring.selectors.identity import identity_forget
from monitoring.services import ingest, intake
from monitoring.services.partitions import partitions_ensure
from monitoring.services.rollups import rollup_run
from pool.agent import config
from pool.agent.outbox import SEGMENT_BYTES, Lane, Outbox
from pool.models import Gpu, Node
from tests.pool.agent.conftest import Process, Site, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial, pytest.mark.usefixtures("swept")]
EACH_S = 2
COUNT = 3600 // EACH_S
MIB = 1024 * 1024


@pytest.fixture
def swept(transactional_db: None) -> Iterator[None]:
    """Partitioned tables are emptied by nobody else."""
    ingest._known_days.clear()
    identity_forget()
    yield
    ingest._known_days.clear()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE monitoring_gpusample, monitoring_gpurollup")


def stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def kept(agent: Process) -> dict[int, dict[str, Any]]:
    """The samples in the spool of an agent that is not running, by their number."""
    lane = Lane(str(agent.state / "outbox" / "samples"))
    found = {message["seq"]: message for message in lane.messages()}
    lane.close()
    return found


def store(messages: list[tuple[int, dict[str, Any]]]) -> Counter[str]:
    """As the sink does it; what was refused, by code."""
    refused: Counter[str] = Counter()
    for node_id, message in messages:
        batch, codes = intake.batch_of(node_id=node_id, message=message)
        refused += codes
        ingest.samples_write(batches=[batch])
    return refused


def test_of_an_hour_without_network_all_that_the_spool_holds_is_stored_once(
    online: Process, site: Site
) -> None:
    [first] = wait_for(lambda: [m for _, m in site.samples if len(m["rows"]) == 2][:1])
    site.stop()
    cut = datetime.now(UTC)
    before = {message["seq"] for _, message in site.samples}
    online.end()
    settings = config.load(str(online.state))
    settings.spool_mib = 1
    config.save(str(online.state), settings)
    # What an agent that samples every two seconds writes in that hour, by the agent's own spool
    spool = Outbox(str(online.state / "outbox"), MIB)
    began = cut - timedelta(hours=1)
    for n in range(COUNT):
        at = stamp(began + timedelta(seconds=EACH_S * n))
        rows = [[row[0], row[1], at, row[3] | {"util": n % 100}, *row[4:]] for row in first["rows"]]
        spool.put({"t": "samples", "rows": rows, "host": first["host"]})
    dropped = spool.samples.dropped
    assert dropped > 0 and spool.samples.size <= MIB + SEGMENT_BYTES, "the spool is bounded"
    spool.close()

    # The agent runs on without a network, and is started anew within the cut
    online.start()
    wait_for(lambda: (online.state / "outbox" / "samples").exists() and len(kept(online)) > COUNT - dropped)
    online.end()
    held = kept(online)
    hour = [seq for seq, message in held.items() if message["rows"][0][2] < stamp(cut)]
    newest = stamp(began + timedelta(seconds=EACH_S * (COUNT - 1)))
    assert max(held[seq]["rows"][0][2] for seq in hour) == newest, "what is left out is the oldest, counted"

    online.start()
    site.start()
    wait_for(lambda: held.keys() - before <= {message["seq"] for _, message in site.samples})
    online.end()

    partitions_ensure(days={began.date(), cut.date(), (cut + timedelta(days=1)).date()})
    identity_forget()
    Node.objects.update(clock_skew_ms=0)
    everything = list(site.samples)
    assert store(everything) == {} and store(everything) == {}, "sent twice, as after a lost acknowledgement"
    told = {(row[0], row[2]) for _, message in everything for row in message["rows"]}
    uuids = dict(Gpu.objects.values_list("pk", "uuid"))
    stored = GpuSample.objects.filter(gpu_id__in=uuids).values_list("gpu_id", "at")
    assert Counter((uuids[gpu], stamp(at)) for gpu, at in stored) == Counter(told)
    states = {uuids[gpu]: stamp(at) for gpu, at in GpuState.objects.values_list("gpu_id", "at")}
    assert states == {uuid: max(at for one, at in told if one == uuid) for uuid in uuids.values()}
    rollup_run()
    minutes = GpuRollup.objects.filter(step=60, slot=0, gpu_id__in=uuids).values_list("samples", flat=True)
    assert sum(minutes) == len(told)
