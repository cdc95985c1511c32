"""Shell, copies and forwarded ports in a lease, through the installation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import termios
import tty
from collections.abc import Callable
from typing import Any

from pool.agent import archive, ws
from pool.agent.channel import (
    CLOSE,
    DATA,
    END,
    ERROR,
    EXIT,
    FLOW,
    INPUT,
    OPEN,
    OPENED,
    ORDER,
    PIECE,
    RESIZE,
    Channel,
    Refusal,
    stream_frame,
    stream_of,
)
from pool.client.api import Api
from pool.client.words import say, text

LIMITS = archive.Limits(files=100_000, bytes=64 * 1024 * archive.MIB)


class Lost(Exception):
    """The connection broke before the end."""


async def _open(api: Api, uid: str, order: dict[str, Any]) -> Channel:
    """A paired channel; ``Refusal`` with the installation's reason."""
    headers = {"Authorization": f"Bearer {api.settings.token}"}
    try:
        socket = await ws.connect(api.socket_url(uid), headers, api.settings.ca_file or None)
        await socket.send_bytes(ORDER + json.dumps(order).encode())
        while True:
            opcode, data = await socket.receive_message()
            message = json.loads(data.decode("utf-8")) if opcode == ws.TEXT else {}
            if message.get("t") == "refused":
                raise Refusal(str(message.get("code")), str(message.get("detail") or ""))
            if message.get("t") == "joined":
                return Channel(socket)
    except (ws.WebSocketError, OSError) as error:
        raise Lost(str(error)) from error


def _run(work: Any) -> Any:
    try:
        return asyncio.run(work)
    except (ws.WebSocketError, OSError) as error:
        raise Lost(str(error) or text("connection lost")) from error


def _failed(content: bytes) -> Refusal:
    found = json.loads(content.decode("utf-8"))
    return Refusal(str(found.get("code")), str(found.get("detail") or ""))


# -- files ---------------------------------------------------------------------------------------------------


def bring_back(
    api: Api, uid: str, folder: str, path: str = ".", changed: bool = True, member: int = 0
) -> archive.Summary:
    """Unpack what lies at ``path`` in the work folder (``changed``: only what the job wrote) below ``folder``."""
    order = {"kind": "get", "path": path, "changed": changed, "member": member}
    with tempfile.TemporaryFile() as kept:
        _run(_get(api, uid, order, kept))
        kept.seek(0)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return archive.unpack(kept, root, LIMITS)
        finally:
            os.close(root)


async def _get(api: Api, uid: str, order: dict[str, Any], out: Any) -> None:
    channel = await _open(api, uid, order)
    whole = False
    try:
        while True:
            kind, content = await channel.receive()
            if kind == DATA:
                out.write(content)
            elif kind == END:
                whole = True
            elif kind == ERROR:
                raise _failed(content)
            elif kind == EXIT:
                break
    finally:
        await channel.socket.close()
    if not whole:
        raise Lost(text("connection lost"))


def send(api: Api, uid: str, source: str, path: str, member: int = 0) -> archive.Packing:
    """Pack a file or folder of this machine and unpack it at ``path`` of the work folder (a folder there)."""
    folder = source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))
    only = "" if os.path.isdir(source) else os.path.basename(source)
    with tempfile.TemporaryFile() as packed:
        done = archive.pack(folder, packed, None, LIMITS, only=only)
        packed.seek(0)
        _run(_put(api, uid, {"kind": "put", "path": path, "member": member}, packed))
    return done


async def _put(api: Api, uid: str, order: dict[str, Any], source: Any) -> None:
    channel = await _open(api, uid, order)

    async def push() -> None:
        while True:
            data = source.read(PIECE)
            if not data:
                break
            await channel.send(INPUT, data)
        await channel.send(END)

    pushing = asyncio.ensure_future(push())
    try:
        done = False
        while True:
            kind, content = await channel.receive()
            if kind == ERROR:
                raise _failed(content)
            done = done or kind == END
            if kind == EXIT:
                break
        if not done:
            raise Lost(text("connection lost"))
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await channel.socket.close()


# -- shell ---------------------------------------------------------------------------------------------------


def _size() -> dict[str, int]:
    found = shutil.get_terminal_size()
    return {"rows": found.lines, "cols": found.columns}


def shell(api: Api, uid: str, argv: list[str], member: int = 0) -> int:
    """A terminal in the lease; the exit code of the shell."""
    order = {
        "kind": "shell",
        "member": member,
        "argv": argv,
        "term": os.environ.get("TERM", "xterm"),
        **_size(),
    }
    on_terminal = sys.stdin.isatty()
    before = termios.tcgetattr(0) if on_terminal else None
    try:
        return int(_run(_shell(api, uid, order, on_terminal)))
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


async def _shell(api: Api, uid: str, order: dict[str, Any], on_terminal: bool) -> int:
    channel = await _open(api, uid, order)
    loop = asyncio.get_event_loop()
    if on_terminal:
        tty.setraw(0)
        loop.add_signal_handler(
            signal.SIGWINCH, lambda: asyncio.ensure_future(channel.send_json(RESIZE, _size()))
        )
    typed: asyncio.Queue[bytes] = asyncio.Queue()
    stop = _read_input(loop, typed.put_nowait)

    async def push() -> None:
        while True:
            data = await typed.get()
            if not data:
                await channel.send(END)
                return
            for start in range(0, len(data), PIECE):
                await channel.send(INPUT, data[start : start + PIECE])

    pushing = asyncio.ensure_future(push())
    try:
        while True:
            kind, content = await channel.receive()
            if kind == DATA:
                sys.stdout.buffer.write(content)
                sys.stdout.buffer.flush()
            elif kind == ERROR:
                raise _failed(content)
            elif kind == EXIT:
                return int(json.loads(content.decode("utf-8")).get("code") or 0)
    finally:
        stop()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await channel.socket.close()


def _read_input(loop: Any, put: Callable[[bytes], None]) -> Callable[[], None]:
    """Give what is typed to ``put``, and an empty piece at its end; the function ends it."""

    def ready() -> None:
        try:
            data = os.read(0, PIECE)
        except OSError:
            data = b""
        put(data)
        if not data:
            loop.remove_reader(0)

    try:
        loop.add_reader(0, ready)
    except PermissionError:  # a plain file, which is always ready
        put(sys.stdin.buffer.read())
        put(b"")
        return lambda: None
    return lambda: loop.remove_reader(0)


# -- ports ---------------------------------------------------------------------------------------------------


def forward(api: Api, uid: str, ref: str, here: int, there: int, member: int = 0) -> int | None:
    """Listen on this machine's loopback only, until Ctrl-C (0) or the end of the work (None)."""
    try:
        _run(_forward(api, uid, ref, here, {"kind": "forward", "port": there, "member": member}))
    except KeyboardInterrupt:
        return 0
    return None


async def _forward(api: Api, uid: str, ref: str, here: int, order: dict[str, Any]) -> None:
    channel = await _open(api, uid, order)
    writers: dict[int, asyncio.StreamWriter] = {}
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        number = count
        writers[number] = writer
        await channel.send(OPEN, stream_frame(number))
        try:
            while True:
                data = await reader.read(PIECE)
                if not data or number not in writers:
                    break
                await channel.send(FLOW, stream_frame(number, data))
        except OSError:
            pass
        if writers.pop(number, None) is not None:
            await channel.send(CLOSE, stream_frame(number))
            writer.close()

    server = None
    try:
        while True:
            kind, content = await channel.receive()
            if kind == OPENED:
                server = await asyncio.start_server(accept, "127.0.0.1", here)
                port = server.sockets[0].getsockname()[1]
                words = "forwarding 127.0.0.1:{here} to port {there} of {ref}; Ctrl-C ends it"
                say(words, here=port, there=order["port"], ref=ref)
            elif kind == FLOW:
                number, data = stream_of(content)
                if number in writers:
                    writers[number].write(data)
                    await writers[number].drain()
            elif kind == CLOSE:
                number, why = stream_of(content)
                found = writers.pop(number, None)
                if found is not None:
                    found.close()
                if why:
                    say("connection {n}: {why}", n=number, why=why.decode("utf-8", "replace"))
            elif kind == ERROR:
                raise _failed(content)
            elif kind == EXIT:
                return
    finally:
        if server is not None:
            server.close()
        await channel.socket.close()


__all__ = ["Lost", "Refusal", "bring_back", "forward", "send", "shell"]
