"""``manage.py replay``: play a recorded workload through the engines and write down what they decide.

Two kinds of record: tasks that are placed one by one on an empty fleet (``--nodes --tasks``), and jobs of departments
that share a pool under quotas (``--jobs --quotas``). No database, cache or queue is touched.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.engine.model import Policy
from pool.engine.replay_jobs import Job, Outcome, replay
from pool.engine.replay_nodes import Decision, TraceError, history_mix, read_nodes, read_tasks, replay_nodes
from portal.kernel.units import MS_PER_SECOND

NODE_COLUMNS = ("node_id", "cpu_milli", "memory_mib", "gpu", "model")
TASK_COLUMNS = ("task_id", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec")
JOB_COLUMNS = ("job_id", "submit_time", "duration", "gpu_num", "vc")
QUOTA_COLUMNS = ("vc", "nominal_gpus")
PATIENCE_S = 20
"""Some seconds without a card are less harm than stopping work that would be done with one just then."""
MS_PER_GPU_HOUR = 3600 * MS_PER_SECOND

Row = dict[str, str]


class Command(BaseCommand):
    help = "Play a recorded workload through the engines (no database) and write what they decide as CSV."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--nodes", help="CSV: node_id,cpu_milli,memory_mib,gpu,model")
        parser.add_argument("--tasks", help="CSV in order of arrival: task_id,cpu_milli,memory_mib,num_gpu,…")
        parser.add_argument(
            "--history", help="tasks of the past to learn the mix from; else from the arrivals"
        )
        parser.add_argument("--jobs", help="CSV: job_id,submit_time,duration,gpu_num,vc (seconds)")
        parser.add_argument("--quotas", help="CSV: vc,nominal_gpus")
        parser.add_argument(
            "--patience",
            type=int,
            default=PATIENCE_S,
            metavar="SECONDS",
            help="so long owners wait for one card to come free by itself (the policy's switch, %(default)s here)",
        )
        parser.add_argument("--out", required=True, help="the CSV file to write")

    def handle(self, *args: Any, **options: Any) -> None:
        given = {name for name in ("nodes", "tasks", "history", "jobs", "quotas") if options[name]}
        if given in ({"nodes", "tasks"}, {"nodes", "tasks", "history"}):
            answer = _replay_nodes(options)
        elif given == {"jobs", "quotas"}:
            answer = _replay_jobs(options)
        else:
            raise CommandError("wanted --nodes and --tasks (and perhaps --history), or --jobs and --quotas")
        self.stdout.write(json.dumps(answer))


def _replay_nodes(options: dict[str, Any]) -> dict[str, Any]:
    try:
        nodes = read_nodes(_rows(options["nodes"], NODE_COLUMNS))
        tasks = read_tasks(_rows(options["tasks"], TASK_COLUMNS))
        past = read_tasks(_rows(options["history"], TASK_COLUMNS)) if options["history"] else None
    except TraceError as error:
        raise CommandError(str(error)) from error
    mix = history_mix(past) if past is not None else None
    decisions = list(replay_nodes(nodes, tasks, mix, time.perf_counter))
    header = ("task_id", "node_id", "gpu_ids", "decision_ms")
    _write(options["out"], header, (_placement(one) for one in decisions))
    milli = {task.id: task.gpus * task.milli for task in tasks}
    used = sum(milli[one.task_id] for one in decisions if one.node)
    cards = sum(len(node.gpus) for node in nodes)
    spent = sum(one.seconds for one in decisions)
    return {
        "tasks": len(decisions),
        "placed": sum(1 for one in decisions if one.node),
        "arrived_percent": round(sum(milli.values()) / 10 / max(1, cards), 3),
        "allocated_percent": round(used / 10 / max(1, cards), 3),
        "decisions_per_s": round(len(decisions) / spent, 1) if spent else None,
    }


def _placement(one: Decision) -> Sequence[Any]:
    return one.task_id, one.node, "-".join(map(str, one.cards)), f"{one.seconds * 1000:.4f}"


def _replay_jobs(options: dict[str, Any]) -> dict[str, Any]:
    jobs = [
        Job(
            id=row["job_id"],
            submitted=_ms(row, "submit_time"),
            duration=_ms(row, "duration"),
            gpus=_whole(row, "gpu_num"),
            department=row["vc"],
        )
        for row in _rows(options["jobs"], JOB_COLUMNS)
    ]
    quotas = {row["vc"]: _whole(row, "nominal_gpus") for row in _rows(options["quotas"], QUOTA_COLUMNS)}
    patience_ms = options["patience"] * MS_PER_SECOND
    outcome: Outcome = replay(jobs, quotas, Policy(reclaim_patience_ms=patience_ms))
    rows = ((_seconds(event.at), event.job, event.kind) for event in outcome.events)
    _write(options["out"], ("t", "job_id", "event"), rows)
    return {
        "jobs": len(jobs),
        "cycles": outcome.cycles,
        "preemptions": outcome.preemptions,
        "patience_s": options["patience"],
        "lost_gpu_hours": round(outcome.lost_gpu_ms / MS_PER_GPU_HOUR, 3),
    }


def _rows(name: str, columns: Sequence[str]) -> list[Row]:
    """Rows of a CSV file, which must have these columns."""
    try:
        with Path(name).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise CommandError(f"{name}: columns missing: {', '.join(missing)}")
            return list(reader)
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{name}: not a CSV file: {error}") from error


def _write(name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    try:
        with Path(name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error


def _ms(row: Row, column: str) -> int:
    try:
        value = round(float(row[column]) * MS_PER_SECOND)
    except (TypeError, ValueError, OverflowError) as error:
        raise CommandError(f"{column} is not a number of seconds: {row[column]!r}") from error
    if value < 0:
        raise CommandError(f"{column} is negative: {row[column]!r}")
    return value


def _whole(row: Row, column: str) -> int:
    value = (row[column] or "").strip()
    if not value.isdecimal():
        raise CommandError(f"{column} is not a whole number: {value[:40]!r}")
    return int(value)


def _seconds(at: int) -> str:
    return f"{at / MS_PER_SECOND:.3f}".rstrip("0").rstrip(".")
