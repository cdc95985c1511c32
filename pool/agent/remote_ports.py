"""A port that the job listens on, reached through the installation: many streams over one line.

Only ports of this very job are reached: the listening socket must belong to one of its processes, so that a lease is no
way to what else listens on the node.
"""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

from pool.agent import procs
from pool.agent.channel import CLOSE, FLOW, OPEN, OPENED, PIECE, stream_frame, stream_of
from pool.agent.line import Line
from pool.agent.remote_files import Trouble

LISTEN = "0A"
MOST_STREAMS = 64
CONNECT_SECONDS = 5.0
STALL_SECONDS = 60.0


def listeners(port: int) -> dict[int, tuple[int, str]]:
    """inode → (family, loopback address to use) of the TCP sockets that listen on ``port`` and can be reached
    from this machine itself."""
    found: dict[int, tuple[int, str]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/net/{name}") as handle:
                rows = handle.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            address, _, number = words[1].rpartition(":")
            if words[3] != LISTEN or int(number, 16) != port:
                continue
            mapped = name == "tcp6" and address.startswith("0000000000000000FFFF0000")
            inner = address[24:] if mapped else address
            if int(inner, 16) == 0 or inner.endswith(("7F", "01000000")):
                found[int(words[9])] = (
                    int(family),
                    "::1" if name == "tcp6" and not mapped else "127.0.0.1",
                )
    return found


def of_job(port: int, pids: set[int]) -> tuple[int, str] | None:
    """How to reach ``port``, where one of these processes listens on it."""
    wanted = listeners(port)
    if not wanted:
        return None
    for pid in pids:
        try:
            handles = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for handle in handles:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{handle}")
            except OSError:
                continue
            if target.startswith("socket:[") and int(target[8:-1]) in wanted:
                return wanted[int(target[8:-1])]
    return None


def run(line: Line, order: dict[str, Any], _job: Any, meta: dict[str, Any], _marked: int) -> int:
    """Serve streams until the person goes."""
    port = int(order.get("port") or 0)
    if not 1 <= port <= 65535:
        raise Trouble("port_invalid", "a port from 1 to 65535 is needed")
    job = (order.get("group"), str(meta["allocation"]), int(meta["member"]))
    streams: dict[int, socket.socket] = {}
    line.write(OPENED, json.dumps({"port": port}).encode())
    while True:
        ready, _, _ = select.select([line.socket, *streams.values()], [], [])
        if line.socket in ready:
            try:
                kind, content = line.read()
            except ConnectionError:
                return 0
            number, data = stream_of(content)
            if kind == OPEN:
                _open(line, streams, number, port, job)
            elif kind == FLOW and number in streams:
                try:
                    streams[number].sendall(data)
                except OSError:
                    _close(line, streams, number)
            elif kind == CLOSE and number in streams:
                streams.pop(number).close()
        for number, stream in list(streams.items()):
            if stream in ready:
                try:
                    data = stream.recv(PIECE)
                except OSError:
                    data = b""
                if data:
                    line.write(FLOW, stream_frame(number, data))
                else:
                    _close(line, streams, number)


def _open(
    line: Line, streams: dict[int, socket.socket], number: int, port: int, job: tuple[Any, str, int]
) -> None:
    why = ""
    where = of_job(port, procs.members(*job)) if len(streams) < MOST_STREAMS else None
    if where is None:
        why = "too_many_streams" if len(streams) >= MOST_STREAMS else "port_not_of_job"
    else:
        stream = socket.socket(where[0], socket.SOCK_STREAM)
        try:
            stream.settimeout(CONNECT_SECONDS)
            stream.connect(
                (where[1], port)
            )  # an address: looking up a name would import what is closed to the account
            stream.settimeout(STALL_SECONDS)
            streams[number] = stream
        except OSError as error:
            stream.close()
            why = str(error) or type(error).__name__
    if why:
        line.write(CLOSE, stream_frame(number, why.encode()))


def _close(line: Line, streams: dict[int, socket.socket], number: int) -> None:
    streams.pop(number).close()
    line.write(CLOSE, stream_frame(number))
