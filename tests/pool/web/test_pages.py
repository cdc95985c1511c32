"""Pages of leases and nodes: who sees what, the log's tail, and acts that only the right people may do."""

from __future__ import annotations

import pytest
from django.test import Client

from pool.models import Allocation, AllocationLog, Gpu
from pool.selectors.logs import log_pieces, log_tail
from pool.selectors.pages import nodes_listed
from pool.services.cycle import schedule_cycle
from pool.web.home_cards import ranges
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


def browser(user: object) -> Client:
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")  # type: ignore[arg-type]
    return client


@pytest.fixture
def held() -> Allocation:
    """Two cards of a node of eight, held and running."""
    team = build.department("vision", name="Vision")
    flavour = build.flavour("h800", installed=None)
    pool.node(flavour, name="sh-01")
    build.limits(team, flavour, 8)
    request = pool.queued(team, flavour, 2)
    request.requester.language = "en"
    request.requester.save()
    schedule_cycle(cause="test")
    allocation = Allocation.objects.get(request=request)
    pool.report_running(allocation)
    allocation.refresh_from_db()
    assert allocation.state == "running"
    return allocation


def test_figures_of_the_node_list_count_each_card_once(held: Allocation) -> None:
    node = nodes_listed().get(name="sh-01")
    assert (node.gpu_total, node.gpu_held, node.gpu_bad) == (8, 2, 0)  # type: ignore[attr-defined]


def test_holder_sees_the_lease_others_do_not_and_administrators_do(held: Allocation) -> None:
    address = f"/leases/{held.uid}/"
    assert browser(held.holder).get(address).status_code == 200
    stranger = build.user(home=build.department("other"), language="en")
    assert browser(stranger).get(address).status_code == 404
    lead = build.user(language="en")
    build.role(lead, "lead", held.department)
    assert browser(lead).get(address).status_code == 200
    assert held.ref not in browser(stranger).get("/leases/?whose=all&state=all").content.decode()
    assert held.ref in browser(lead).get("/leases/?whose=all").content.decode()


def test_a_stranger_sees_the_node_but_not_who_is_on_it(held: Allocation) -> None:
    node = held.members.get().node
    stranger = build.user(home=build.department("other"), language="en")
    page = browser(stranger).get(f"/nodes/{node.uid}/").content.decode()
    assert held.ref not in page
    assert held.holder.display_name not in page
    assert "Vision" in page


def test_release_by_post_of_the_holder_only(held: Allocation) -> None:
    address = f"/leases/{held.uid}/do/release/"
    assert browser(held.holder).get(address).status_code == 405
    lead = build.user(language="en")
    build.role(lead, "lead", held.department)
    browser(lead).post(address)
    held.refresh_from_db()
    assert held.state == "running"
    browser(held.holder).post(address, {"reason": "done"})
    held.refresh_from_db()
    assert (held.state, held.end_reason) == ("stopping", "released")


@pytest.mark.parametrize("hours", ["", "0", "-3", "abc", "1e9", "nan", "2161"])
def test_an_absurd_extension_changes_nothing(held: Allocation, hours: str) -> None:
    before = held.expires_at
    response = browser(held.holder).post(f"/leases/{held.uid}/do/extend/", {"hours": hours})
    assert response.status_code == 302
    held.refresh_from_db()
    assert held.expires_at == before


def test_tail_of_a_log_is_cut_at_a_line_and_pieces_come_in_order(held: Allocation) -> None:
    offset = 0
    for number in range(30):
        data = f"line {number} {'x' * 900}\n"
        AllocationLog.objects.create(allocation=held, member=0, offset=offset, data=data)
        offset += len(data.encode())
    tail = log_tail(allocation_id=held.pk, member=0, chars=5000)
    assert tail.lines[-1].startswith("line 29 ")
    assert all(line.startswith("line ") for line in tail.lines)
    assert (len(tail.lines), tail.more, tail.size) == (5, True, offset)
    whole = "".join(log_pieces(allocation_id=held.pk, member=0))
    assert [line.split()[1] for line in whole.splitlines()] == [str(n) for n in range(30)]
    page = browser(held.holder).get(f"/leases/{held.uid}/log/")
    assert "line 29" in page.content.decode()
    download = browser(held.holder).get(f"/leases/{held.uid}/log.txt")
    assert b"".join(download.streaming_content) == whole.encode()  # type: ignore[attr-defined]


def test_a_log_is_shown_as_text_never_as_markup(held: Allocation) -> None:
    AllocationLog.objects.create(allocation=held, offset=0, data="<script>alert(1)</script>\n")
    page = browser(held.holder).get(f"/leases/{held.uid}/log/").content.decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_node_page_says_whose_account_work_runs_under(held: Allocation) -> None:
    node = held.members.get().node
    node.run_as_root = True
    node.facts = {"otherwise_account": "nobody"}
    node.save()
    address = f"/nodes/{node.uid}/"
    page = browser(held.holder).get(address).content.decode()
    assert 'each person\'s own account; <span class="mono">nobody</span> for people who have none' in page
    node.facts = {}
    node.save()
    assert (
        "people who have none on this node cannot work here"
        in browser(held.holder).get(address).content.decode()
    )


def test_work_without_a_gpu_claims_no_gpu_seen_free_and_no_share_of_the_host(held: Allocation) -> None:
    held.members.update(cpu_milli=0, memory_mib=0)
    held.events.create(kind="ended", facts={"reason": "finished"}, at=held.created_at)
    address = f"/leases/{held.uid}/"
    page = browser(held.holder).get(address).content.decode()
    assert "all its GPUs were seen free" in page
    assert "none was asked for" in page
    Allocation.objects.filter(pk=held.pk).update(charge_milli=0)
    page = browser(held.holder).get(address).content.decode()
    assert "all its GPUs were seen free" not in page
    assert "nothing of it runs any more" in page


def test_home_tells_the_place_and_the_run_of_time_of_what_is_held(held: Allocation) -> None:
    page = browser(held.holder).get("/leases/mine/cards/").content.decode()
    assert f'href="/nodes/{held.members.get().node.uid}/">sh-01 · GPU 0–1</a>' in page
    assert held.ref in page and "Running" in page
    assert 'data-tone="info"' in page and "left</span>" in page  # how far its time has run
    assert held.ref not in browser(build.user(language="en")).get("/leases/mine/cards/").content.decode()


@pytest.mark.parametrize(
    ("numbers", "words"), [([], ""), ([3], "3"), ([2, 0, 1], "0–2"), ([0, 1, 3, 5, 6, 6], "0–1, 3, 5–6")]
)
def test_card_numbers_are_written_as_ranges(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


def test_lists_are_told_the_place_in_line_by_those_who_may_know(held: Allocation) -> None:
    waits = pool.queued(held.department, held.flavour, 8)  # type: ignore[arg-type]
    waits.requester.language = "en"
    waits.requester.save()
    schedule_cycle(cause="test")
    address = f"/pool/queue/brief/?of={waits.pk},{held.request_id},x,99999999999999999999"
    own = browser(waits.requester).get(address).content.decode()
    assert f'id="q-note-{waits.pk}"' in own and "place 1 of 1" in own and "It needs 8 free" in own
    assert held.ref not in own
    lead = build.user(language="en")
    build.role(lead, "lead", held.department)
    both = browser(lead).get(address).content.decode()
    assert f'id="q-when-{held.request_id}"' in both and held.ref in both and "place 1 of 1" in both
    assert "q-note" not in browser(build.user(language="en")).get(address).content.decode()


def test_a_node_with_a_card_out_of_order_needs_a_look(held: Allocation) -> None:
    keeper = build.user(language="en")
    build.role(keeper, "pool_admin")
    client = browser(keeper)
    assert "All nodes that ever reported are healthy and open" in client.get("/operations/").content.decode()
    Gpu.objects.filter(node__name="sh-01", index=3).update(condition=Gpu.Condition.SUSPECT)
    page = client.get("/operations/").content.decode()
    assert "All nodes that ever reported" not in page
    assert page.count(">GPU 3</a>") == 1 and "Suspect" in page
