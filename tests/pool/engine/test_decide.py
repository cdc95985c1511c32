"""Decisions on small pools: who starts where, and the exact reason of who waits."""

from __future__ import annotations

from typing import Any

import pytest

from pool.engine.decide import decide
from pool.engine.model import (
    WHOLE,
    Fabric,
    Plan,
    Policy,
    Request,
    Snapshot,
    Take,
    UserRoom,
    Waiting,
    version_of,
)
from pool.engine.whatif import place_check
from quotas.engine.flavours import FlavourPolicy
from quotas.engine.tree import QuotaNode
from tests.pool.engine.builders import HOUR, NOW, ask, node, pool, quota, run, split_node


def plan(snapshot: Snapshot, **policy: object) -> Plan:
    return decide(snapshot, Policy(**policy), NOW)  # type: ignore[arg-type]


def placed(result: Plan) -> dict[int, list[tuple[int, list[int]]]]:
    """request → [(node, card indexes)] per member."""
    return {
        place.request_id: [(m.node_id, [take.gpu_id % 100 for take in m.takes]) for m in place.members]
        for place in result.places
    }


def why(result: Plan, request_id: int = 1) -> Waiting:
    return next(one for one in result.waiting if one.request_id == request_id)


class TestWholeCards:
    def test_goes_to_the_node_that_it_fills_best(self) -> None:
        result = plan(pool([node(1), node(2, 4)], [ask(1, 4)]))
        assert placed(result) == {1: [(2, [0, 1, 2, 3])]}
        assert (result.places[0].flavour, result.places[0].charge_milli) == ("A100", 4000)
        assert result.places[0].ends_at == NOW + 4 * HOUR

    def test_gang_takes_one_cluster(self) -> None:
        nodes = [node(1, cluster_id=1), node(2, cluster_id=2), node(3, cluster_id=2)]
        assert placed(plan(pool(nodes, [ask(1, 8, nodes=2)]))) == {
            1: [(2, list(range(8))), (3, list(range(8)))]
        }

    def test_gang_is_all_or_nothing_and_says_what_is_missing(self) -> None:
        result = plan(pool([node(1), node(2)], [ask(1, 8, nodes=2)], [run(1, 1, [0])]))
        assert result.places == ()
        waiting = why(result)
        assert waiting.code == "no_node_fits"
        assert waiting.figures == {
            "flavour": "A100", "need_per_node": 8, "need_nodes": 2, "best_free_on_one_node": 8,
            "nodes_that_fit": 1, "nodes_missing": 1, "missing": 0, "next_release_at": NOW + 4 * HOUR,
            "free": 15, "installed": 16,
            "nodes": [{"node": "n2", "free": 8, "of": 8}, {"node": "n1", "free": 7, "of": 8}],
            "nodes_with_free": 2, "excluded": [],
        }  # fmt: skip

    def test_gang_never_crosses_sites(self) -> None:
        result = plan(pool([node(1), node(2, site="sh")], [ask(1, 8, nodes=2)]))
        assert why(result).code == "split_over_sites"
        assert why(result).figures == {
            "need_nodes": 2, "best_in_one_site": 1, "flavour": "A100", "sites": {"bj": 1, "sh": 1},
        }  # fmt: skip

    def test_no_node_fits_carries_the_sum(self) -> None:
        result = plan(pool([node(1), node(2), node(3, blocked="cordoned")], [ask(1, 8)],
                           [run(1, 1, [0, 1, 2]), run(2, 2, range(6))]))  # fmt: skip
        waiting = why(result)
        assert waiting.code == "no_node_fits"
        assert waiting.figures == {
            "flavour": "A100", "need_per_node": 8, "need_nodes": 1, "best_free_on_one_node": 5,
            "nodes_that_fit": 0, "nodes_missing": 1, "missing": 3, "next_release_at": NOW + 4 * HOUR,
             "free": 7, "installed": 16,
            "nodes": [{"node": "n1", "free": 5, "of": 8}, {"node": "n2", "free": 2, "of": 8}],
            "nodes_with_free": 2, "excluded": [{"because": "cordoned", "count": 1, "nodes": ["n3"]}],
        }  # fmt: skip

    def test_all_in_use(self) -> None:
        result = plan(pool([node(1)], [ask(1, 2)], [run(1, 1, range(8))]))
        assert why(result).code == "waiting_for_release"
        assert why(result).figures == {
            "flavour": "A100",
            "need": 2,
            "installed": 8,
            "free": 0,
            "excluded": [],
            "next_release_at": NOW + 4 * HOUR,
        }

    def test_cards_of_one_link_group_are_kept_together(self) -> None:
        base = node(1)
        cards = tuple(
            type(g)(g.id, g.index, g.flavour, g.memory_mib, link_group=g.index // 4) for g in base.gpus
        )
        linked = type(base)(1, "n1", 1, "bj", cards, nvlink=True)
        assert placed(plan(pool([linked], [ask(1, 4)], [run(1, 1, [0])]))) == {1: [(1, [4, 5, 6, 7])]}

    def test_sick_card_is_left_alone(self) -> None:
        result = plan(pool([node(1, 2, card={"blocked": "xid_79"})], [ask(1, 1)]))
        assert why(result).code == "larger_than_any_node"
        assert why(result).figures["largest_node"] == 0


class TestConstraints:
    @pytest.mark.parametrize(
        ("request_", "code", "figures"),
        [
            (ask(1, 1, "B200"), "model_absent", {"flavours": ["B200"]}),
            (ask(1, 1, "A100", fp8=True), "fp8_absent", {"flavour": "A100"}),
            (ask(1, 1, "A100", min_gpu_mib=50000), "memory_too_small",
             {"flavour": "A100", "need_mib": 50000, "has_mib": 40960}),
            (ask(1, 1, "A100", site="gz"), "other_site", {"flavour": "A100", "site": "gz", "sites": ["bj"]}),
            (ask(1, 1, "A100", min_driver=(550,)), "driver_too_old",
             {"flavour": "A100", "needed": "550", "newest": "535.104", "nodes": 1,
              "excluded": [{"because": "driver_too_old", "count": 1, "nodes": ["n1"]}]}),
            (ask(1, 9), "larger_than_any_node",
             {"need_per_node": 9, "largest_node": 8, "flavour": "A100", "excluded": []}),
            (ask(1, 8, nodes=3), "too_few_nodes",
             {"need_nodes": 3, "large_enough": 1, "flavour": "A100", "excluded": []}),
            (ask(1, 1, cpu_milli=65000), "host_short",
             {"flavour": "A100", "need_cpu_milli": 65000, "best_cpu_milli": 64000, "need_memory_mib": 0,
              "best_memory_mib": 1000}),
            (ask(1, 1, start_at=NOW + HOUR), "not_before", {"start_at": NOW + HOUR, "kept": True}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_what_can_never_be_is_said(self, request_: Request, code: str, figures: dict) -> None:
        pool_ = pool([node(1, driver=version_of("535.104"), cpu_milli=64000, memory_mib=1000)], [request_])
        result = plan(pool_)
        assert (why(result).code, why(result).figures) == (code, figures)

    def test_next_acceptable_flavour_is_taken(self) -> None:
        result = plan(
            pool([node(1), node(2, flavour="H100")], [ask(1, 2, "A100", "H100")], [run(1, 1, range(8))])
        )
        assert placed(result) == {1: [(2, [0, 1])]}
        assert result.places[0].flavour == "H100"

    def test_open_ask_leaves_the_scarce_model(self) -> None:
        nodes = [node(1), node(2, flavour="H100")]
        pending = [ask(1, 1, "H100", "A100"), ask(2, 8, "H100", priority=10)]
        assert placed(plan(pool(nodes, pending))) == {1: [(1, [0])], 2: [(2, list(range(8)))]}
        named = [ask(1, 1, "H100", "A100", ranked=True), pending[1]]
        assert 2 not in placed(plan(pool(nodes, named)))


class TestFractions:
    def test_shared_card_is_filled_before_a_fresh_one(self) -> None:
        half = {"shape": "fraction", "milli": 500}
        result = plan(pool([node(1, 2, "T4")], [ask(1, 1, "T4", **half), ask(2, 1, "T4", **half)]))
        assert [place.members[0].takes for place in result.places] == [
            (Take(100, ((0, 500),), 500, 8192),),
            (Take(100, ((500, 1000),), 500, 8192),),
        ]

    def test_memory_share_is_charged_when_larger(self) -> None:
        result = plan(
            pool([node(1, 1, "T4")], [ask(1, 1, "T4", shape="fraction", milli=100, share_mib=12288)])
        )
        assert result.places[0].charge_milli == 750
        assert result.places[0].members[0].takes == (Take(100, ((0, 750),), 750, 12288),)

    def test_a_fraction_may_use_several_gaps(self) -> None:
        thirds = [ask(n, 1, "T4", shape="fraction", milli=300) for n in (1, 2, 3)]
        first = plan(pool([node(1, 1, "T4")], thirds))
        assert [p.members[0].takes[0].spans for p in first.places] == [
            ((0, 300),),
            ((300, 600),),
            ((600, 900),),
        ]
        held = [
            run(1, 1, [], flavour="T4"),
        ]
        middle = type(held[0])(
            1, 9, 2, "T4", 300, (type(first.places[1].members[0])(0, 1, 0, 0, first.places[1].members[0].takes),),
            ends_at=NOW + HOUR,
        )  # fmt: skip
        result = plan(pool([node(1, 1, "T4")], [ask(5, 1, "T4", shape="fraction", milli=600)], [middle]))
        assert result.places[0].members[0].takes[0].spans == ((0, 300), (600, 900))

    def test_no_card_has_room(self) -> None:
        pending = [ask(n, 1, "T4", shape="fraction", milli=600) for n in (1, 2)]
        result = plan(pool([node(1, 1, "T4")], pending))
        assert why(result, 2).code == "no_card_fits"
        assert why(result, 2).figures == {
            "flavour": "T4", "need_milli": 600, "need_mib": 9830, "need_cards": 1, "best_free_milli": 400,
            "best_free_mib": 6554, "excluded": [],
        }  # fmt: skip


class TestMig:
    def test_slices_come_from_the_fullest_card_and_carry_the_floor_charge(self) -> None:
        nodes = [split_node(1, ["3g.20gb", "2g.10gb", "1g.5gb"], count=2)]
        result = plan(pool(nodes, [ask(1, 2, shape="mig", profile="2g.10gb")]))
        takes = result.places[0].members[0].takes
        assert [(take.gpu_id, take.charge_milli) for take in takes] == [(100, 285), (101, 285)]
        assert result.places[0].charge_milli == 570
        assert all(take.slice_id is not None for take in takes)

    def test_absent_profile_and_none_free(self) -> None:
        nodes = [split_node(1, ["7g.40gb"])]
        result = plan(
            pool(nodes, [ask(1, 1, shape="mig", profile="1g.5gb"), ask(2, 1, shape="mig", profile="9g")])
        )
        assert why(result, 1).code == "no_slice_free"
        assert why(result, 1).figures == {
            "profile": "1g.5gb", "need": 1, "best_free_on_one_node": 0, "free": 0, "existing": 0,
            "flavour": "A100", "excluded": [],
        }  # fmt: skip
        assert why(result, 2).code == "mig_profile_absent"

    def test_whole_work_keeps_off_split_cards(self) -> None:
        result = plan(pool([split_node(1, ["7g.40gb"])], [ask(1, 1)]))
        assert why(result).code == "larger_than_any_node"


class TestQuota:
    TREE = (
        QuotaNode(1, guarantee=16000),
        QuotaNode(2, 1, guarantee=8000, hard_cap=10000),
        QuotaNode(3, 1, guarantee=8000),
    )

    def test_cap_blocks_with_level_and_sum(self) -> None:
        result = plan(pool([node(1), node(2)], [ask(1, 8), ask(2, 4)], quotas=quota(*self.TREE)))
        assert placed(result) == {1: [(1, list(range(8)))]}
        assert why(result, 2).code == "quota_blocked"
        assert why(result, 2).figures == {
            "level": 2, "rule": "hard_cap", "limit": 10000, "used": 8000, "requested": 4000, "available": 2000,
            "flavour": "A100",
        }  # fmt: skip

    def test_borrowed_part_is_told(self) -> None:
        result = plan(pool([node(1), node(2)], [ask(1, 8), ask(2, 2)], quotas=quota(*self.TREE)))
        assert [(p.request_id, p.borrowed_milli) for p in result.places] == [(1, 0), (2, 2000)]

    def test_department_below_its_guarantee_goes_first(self) -> None:
        rich = tuple(
            QuotaNode(n.id, n.parent, guarantee=n.guarantee, charged=8000, total=8000)
            if n.id in (1, 2)
            else n
            for n in (QuotaNode(1, guarantee=16000), QuotaNode(2, 1, guarantee=8000), self.TREE[2])
        )
        pending = [ask(1, 4, priority=100), ask(2, 8, department_id=3)]
        result = plan(pool([node(1)], pending, quotas=quota(*rich)))
        assert list(placed(result)) == [2]
        assert why(result, 1).ahead == ()
        assert (why(result, 1).position, why(result, 1).of) == (1, 1)

    def test_flavour_within_the_guarantee_before_borrowing(self) -> None:
        quotas = quota(QuotaNode(2, guarantee=0, borrow_limit=8000), QuotaNode(9, guarantee=8000)) | quota(
            QuotaNode(2, guarantee=8000), flavour="H100"
        )
        quotas["A100"] = (QuotaNode(1, guarantee=8000), QuotaNode(2, 1, guarantee=0))
        nodes = [node(1), node(2, flavour="H100")]
        pending = [ask(1, 1, "A100", "H100", ranked=True)]
        assert plan(pool(nodes, pending, quotas=quotas)).places[0].flavour == "H100"
        stop = FlavourPolicy(when_can_borrow="stop")
        assert plan(pool(nodes, pending, quotas=quotas), flavour=stop).places[0].flavour == "A100"

    def test_personal_limit(self) -> None:
        pending = [ask(1, 2, user_id=7), ask(2, 2, user_id=7)]
        result = plan(pool([node(1)], pending, users={7: UserRoom(5000, 2000)}))
        assert list(placed(result)) == [1]
        assert (why(result, 2).code, why(result, 2).figures) == (
            "user_limit", {"limit": 5000, "used": 4000, "requested": 2000},
        )  # fmt: skip


class TestBackfill:
    def test_blocked_gang_keeps_its_place_and_short_work_passes(self) -> None:
        nodes = [node(1)]
        running = [run(1, 1, range(6), hours=2)]
        pending = [ask(1, 8), ask(2, 2, duration_ms=2 * HOUR), ask(3, 2, duration_ms=2 * HOUR + 1)]
        result = plan(pool(nodes, pending, running))
        assert placed(result) == {2: [(1, [6, 7])]}
        first = why(result, 1)
        assert first.reserved is not None
        assert first.reserved.start_at == NOW + 2 * HOUR
        assert first.estimate is not None
        assert (first.estimate.earliest, first.estimate.latest) == (
            NOW + 2 * HOUR,
            NOW + 2 * HOUR + HOUR // 2,
        )
        assert why(result, 3).position == 2

    def test_long_work_waits_behind_the_promise(self) -> None:
        pending = [ask(1, 8), ask(2, 2, duration_ms=3 * HOUR), ask(3, 1, duration_ms=None)]
        result = plan(pool([node(1)], pending, [run(1, 1, range(6), hours=2)]))
        assert result.places == ()
        assert why(result, 2).code == "behind"
        assert why(result, 2).figures == {"requests": [1], "reserved_from": NOW + 2 * HOUR, "flavour": "A100"}
        assert why(result, 2).ahead == (1,)
        assert why(result, 3).code == "behind"

    def test_long_work_may_use_what_nobody_was_promised(self) -> None:
        pending = [ask(1, 8), ask(2, 2, duration_ms=None)]
        result = plan(pool([node(1), node(2, 4)], pending, [run(1, 1, range(6), hours=2)]))
        assert placed(result) == {2: [(2, [0, 1])]}

    def test_second_gang_is_planned_after_the_first(self) -> None:
        pending = [ask(1, 8, duration_ms=5 * HOUR), ask(2, 8, duration_ms=HOUR)]
        result = plan(pool([node(1)], pending, [run(1, 1, [0], hours=2)]))
        assert [(r.request_id, r.start_at) for r in result.reserves] == [
            (1, NOW + 2 * HOUR),
            (2, NOW + 7 * HOUR),
        ]

    def test_without_an_end_there_is_no_estimate(self) -> None:
        result = plan(pool([node(1)], [ask(1, 8)], [run(1, 1, [0], hours=None)]))
        assert (why(result).estimate, why(result).reserved) == (None, None)

    def test_what_is_past_its_end_counts_as_free_soon(self) -> None:
        result = plan(pool([node(1)], [ask(1, 8)], [run(1, 1, [0], hours=-1)]), overdue_ms=5)
        assert result.reserves[0].start_at == NOW + 5

    def test_only_the_first_blocked_are_promised_something(self) -> None:
        pending = [ask(n, 8) for n in range(1, 8)]
        result = plan(pool([node(1)], pending, [run(1, 1, [0])]), max_reservations=2)
        assert [reserve.request_id for reserve in result.reserves] == [1, 2]
        assert [one.position for one in result.waiting] == [1, 2, 3, 4, 5, 6, 7]

    def test_host_cpu_is_promised_too(self) -> None:
        nodes = [node(1, 8, cpu_milli=16000, memory_mib=1000)]
        running = [run(1, 1, range(4), hours=1, cpu_milli=8000)]
        pending = [ask(1, 4, cpu_milli=12000), ask(2, 1, cpu_milli=5000, duration_ms=9 * HOUR)]
        result = plan(pool(nodes, pending, running))
        assert result.places == ()
        assert why(result, 1).code == "host_short"
        assert why(result, 2).code == "behind"


class TestTest:
    def test_cpu_only_work_goes_to_a_node_kept_for_it(self) -> None:
        nodes = [
            node(1, cpu_milli=8000, memory_mib=100),
            node(2, 0, cpu_only=True, cpu_milli=8000, memory_mib=100),
        ]
        result = plan(pool(nodes, [Request(1, 2, (), shape="cpu", per_node=0, cpu_milli=1000)]))
        assert [(m.node_id, m.cpu_milli, m.takes) for m in result.places[0].members] == [(2, 1000, ())]
        assert (result.places[0].flavour, result.places[0].charge_milli) == (None, 0)


class TestWhatIf:
    def test_fits_now(self) -> None:
        check = place_check(
            pool([node(1)], quotas=quota(QuotaNode(2, guarantee=4000))), Policy(), NOW, ask(99, 4)
        )
        assert (check.free_now, check.starts_now, check.waiting) == (True, True, None)
        assert check.flavours[0].charge_milli == 4000

    def test_place_is_there_but_others_are_before(self) -> None:
        snapshot = pool([node(1)], [ask(1, 8)], [run(1, 1, range(6))])
        check = place_check(snapshot, Policy(), NOW, ask(99, 2, duration_ms=9 * HOUR))
        assert (check.free_now, check.starts_now) == (True, False)
        assert check.waiting is not None
        assert (check.waiting.code, check.waiting.position, check.waiting.of) == ("behind", 2, 2)

    def test_quota_says_no(self) -> None:
        snapshot = pool([node(1)], quotas=quota(QuotaNode(2, guarantee=4000)))
        check = place_check(snapshot, Policy(), NOW, ask(99, 5), in_line=False)
        assert not check.free_now
        assert check.refusal is not None
        assert check.refusal.code == "quota_blocked"
        assert check.refusal.figures["rule"] == "subtree_quota"


def test_versions() -> None:
    assert version_of("550.54.15") == (550, 54, 15)
    assert version_of("12.4-rc1") == (12,)
    assert version_of("") == ()
    assert (WHOLE, version_of("535") < version_of("535.1")) == ((0, 1000), True)


class TestClasses:
    def test_within_a_department_and_priority_the_weightier_class_comes_first(self) -> None:
        pending = [
            ask(1, 8), ask(2, 8, job_class="interactive"), ask(3, 8, priority=60), ask(4, 8, job_class="inference"),
        ]  # fmt: skip
        line = decide(
            pool([node(1, 4)], pending), Policy(class_weights={"interactive": 3, "inference": 0}), NOW
        )
        assert [one.request_id for one in line.waiting] == [3, 2, 1, 4]
        assert [one.request_id for one in plan(pool([node(1, 4)], pending)).waiting] == [3, 1, 2, 4]


class TestWindows:
    """Work that is to start later keeps its places against those that stand behind it."""

    def test_later_long_work_keeps_off_and_short_work_passes(self) -> None:
        window = ask(1, 8, start_at=NOW + 2 * HOUR)
        pending = [window, ask(2, 2, duration_ms=2 * HOUR), ask(3, 2, duration_ms=2 * HOUR + 1)]
        result = plan(pool([node(1)], pending))
        assert list(placed(result)) == [2]
        assert {r.request_id: r.start_at for r in result.reserves} == {1: NOW + 2 * HOUR, 3: NOW + 6 * HOUR}
        kept = why(result, 1)
        assert (kept.code, kept.figures) == ("not_before", {"start_at": NOW + 2 * HOUR, "kept": True})
        assert kept.estimate is not None
        assert (kept.estimate.earliest, kept.estimate.basis) == (NOW + 2 * HOUR, "reservation")
        assert why(result, 3).figures["requests"] == [1]

    def test_those_before_it_in_line_come_first(self) -> None:
        pending = [ask(1, 8, duration_ms=9 * HOUR), ask(2, 8, start_at=NOW + 2 * HOUR)]
        result = plan(pool([node(1)], pending))
        assert list(placed(result)) == [1]
        assert why(result, 2).figures == {"start_at": NOW + 2 * HOUR, "kept": False}
        assert why(result, 2).estimate is None

    def test_a_blocked_gang_fits_in_before_a_far_window(self) -> None:
        running = [run(1, 1, range(6), hours=1)]
        pending = [ask(1, 8, start_at=NOW + 20 * HOUR), ask(2, 8, duration_ms=3 * HOUR)]
        result = plan(pool([node(1)], pending, running))
        assert {r.request_id: r.start_at for r in result.reserves} == {1: NOW + 20 * HOUR, 2: NOW + HOUR}

    def test_its_time_has_come(self) -> None:
        assert list(placed(plan(pool([node(1)], [ask(1, 8, start_at=NOW)])))) == [1]

    def test_windows_in_the_far_future_are_not_kept_yet(self) -> None:
        result = plan(pool([node(1)], [ask(1, 8, start_at=NOW + 400 * HOUR)]))
        assert why(result).figures["kept"] is False


class TestWholePool:
    """The root of the quota tree is all there is: when it is used up, cards are what is waited for."""

    def test_a_full_pool_is_waited_for_with_a_range(self) -> None:
        tree = (
            QuotaNode(0, guarantee=8000, charged=8000, total=8000),
            QuotaNode(2, 0, guarantee=0, charged=8000, total=8000),
        )
        snapshot = pool([node(1)], [ask(1, 2)], [run(1, 1, range(8), hours=2)], quotas=quota(*tree))
        waiting = why(plan(snapshot))
        assert waiting.code == "waiting_for_release"
        assert waiting.estimate is not None
        assert waiting.estimate.earliest == NOW + 2 * HOUR

    def test_a_gang_keeps_its_promise_while_small_work_passes(self) -> None:
        tree = (
            QuotaNode(0, guarantee=8000, charged=6000, total=6000),
            QuotaNode(2, 0, guarantee=0, charged=6000, total=6000),
        )
        pending = [ask(1, 8), ask(2, 2, duration_ms=3 * HOUR), ask(3, 2, duration_ms=HOUR)]
        result = plan(pool([node(1)], pending, [run(1, 1, range(6), hours=2)], quotas=quota(*tree)))
        assert [reserve.request_id for reserve in result.reserves] == [1, 2]
        assert list(placed(result)) == [3]
        assert why(result, 2).code == "behind"

    def test_kept_capacity_of_others_is_still_a_matter_of_quota(self) -> None:
        tree = (
            QuotaNode(0, guarantee=8000),
            QuotaNode(2, 0, guarantee=0),
            QuotaNode(3, 0, guarantee=8000, lend_limit=0),
        )
        waiting = why(plan(pool([node(1)], [ask(1, 2)], quotas=quota(*tree))))
        assert waiting.code == "quota_blocked"
        assert (waiting.figures["level"], waiting.figures["limit"]) == (0, 0)


class TestTogether:
    """Enough nodes, but not where a gang must be."""

    def test_one_domain(self) -> None:
        nodes = [node(1, domain=("a",)), node(2, domain=("a",)), node(3, domain=("b",))]
        waiting = why(plan(pool(nodes, [ask(1, 8, nodes=3, domain_required=1)])))
        assert (waiting.code, waiting.figures) == (
            "split_over_domains", {"need_nodes": 3, "flavour": "A100", "best_together": 2, "level": 1},
        )  # fmt: skip

    def test_one_fabric(self) -> None:
        one, other = (Fabric("infiniband", 400, "ib1"),), (Fabric("infiniband", 400, "ib2"),)
        nodes = [node(1, fabrics=one), node(2, fabrics=other)]
        waiting = why(plan(pool(nodes, [ask(1, 8, nodes=2, fabric="infiniband")])))
        assert (waiting.code, waiting.figures) == (
            "split_over_fabrics",
            {"need_nodes": 2, "flavour": "A100", "best_together": 1, "fabric": "infiniband"},
        )

    def test_an_image_goes_where_images_run(self) -> None:
        found = plan(pool([node(1, no_images=True), node(2)], [ask(1, 1, image=True)]))
        assert [one.members[0].node_id for one in found.places] == [2]
        waiting = why(plan(pool([node(1, no_images=True)], [ask(1, 1, image=True)])))
        assert (waiting.code, waiting.figures["nodes"]) == ("images_absent", 1)

    @pytest.mark.parametrize(
        ("changes", "code", "asked"),
        [
            ({"storage": "nvme"}, "storage_absent", "nvme"),
            ({"datasets": ("imagenet",), "stage_datasets": False}, "dataset_absent", ["imagenet"]),
            ({"fabric": "roce", "min_fabric_gbps": 200}, "fabric_absent", {"kind": "roce", "gbps": 200}),
            ({"within": ("row1",)}, "outside_domain", ["row1"]),
            ({"nodes": 2, "domain_required": 1}, "domain_unknown", 1),
        ],
    )
    def test_what_no_node_has(self, changes: dict[str, Any], code: str, asked: object) -> None:
        waiting = why(plan(pool([node(1), node(2), node(3, blocked="cordoned")], [ask(1, 1, **changes)])))
        assert waiting.code == code
        assert (waiting.figures["asked"], waiting.figures["nodes"]) == (asked, 2)
        assert {one["because"] for one in waiting.figures["excluded"]} == {code, "cordoned"}
