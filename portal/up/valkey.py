"""The embedded Redis-protocol server: Valkey on a unix socket, with an append-only file."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from portal.up.accounts import Account
from portal.up.binaries import valkey_server
from portal.up.errors import UpError
from portal.up.layout import Layout


@dataclass
class EmbeddedValkey:
    """One server in a data folder; it runs under the same account as the database."""

    layout: Layout
    program: str
    account: Account

    @classmethod
    def of(cls, layout: Layout, account: Account) -> "EmbeddedValkey":
        return cls(layout, valkey_server(), account)

    @property
    def socket(self) -> Path:
        return self.layout.sockets / "valkey.sock"

    def command(self) -> list[str]:
        """The server's command line. Every write reaches the file within a second; truth stays in the
        database."""
        return self.account.command(
            self.program,
            *("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *(
                "--dir",
                str(self.layout.valkey),
                "--appendonly",
                "yes",
                "--appendfsync",
                "everysec",
                "--save",
                "",
            ),
            *("--daemonize", "no", "--databases", "16", "--maxmemory-policy", "noeviction"),
            *("--aof-load-truncated", "yes", "--loglevel", "notice"),
        )

    def url(self, number: int) -> str:
        """REDIS_URL of a database number."""
        return f"unix://{quote(str(self.socket))}?db={number}"

    def ask(self, *words: str, timeout: float = 1.0) -> str:
        """Send one command and give the first line of the answer without its mark; UpError where none
        comes."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(w.encode())}\r\n{w}\r\n" for w in words)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(timeout)
                client.connect(str(self.socket))
                client.sendall(request.encode())
                answer = client.recv(4096)
        except OSError as error:
            raise UpError(f"Valkey does not answer on {self.socket}: {error}") from None
        return answer.split(b"\r\n", 1)[0].decode(errors="replace")[1:]

    def is_ready(self) -> bool:
        """Whether it answers, its file loaded."""
        if not self.socket.exists():
            return False
        try:
            return self.ask("PING", timeout=0.3) == "PONG"
        except UpError:
            return False

    def flush(self, number: int) -> None:
        """Empty one of its databases."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(5)
            client.connect(str(self.socket))
            for line in (f"SELECT {number}", "FLUSHDB"):
                client.sendall(f"{line}\r\n".encode())
                if not client.recv(64).startswith(b"+OK"):
                    raise UpError(f"Valkey refused {line}")
