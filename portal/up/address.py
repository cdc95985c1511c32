"""The address that people open: a listening socket that outlives a web process, and what to call it."""

import errno
import os
import socket
from dataclasses import dataclass

from portal.up.errors import UpError


@dataclass(frozen=True)
class Address:
    """A listening TCP socket. The supervisor keeps it, so a web process can end and start without a refused
    page."""

    listening: socket.socket
    host: str
    port: int

    @property
    def shown(self) -> str:
        """The base URL to print: GPUPOOL_BASE_URL where it is given."""
        given = os.environ.get("GPUPOOL_BASE_URL", "").rstrip("/")
        if given:
            return given
        name = self.host
        if name in ("0.0.0.0", "::"):
            name = socket.gethostname() or "localhost"
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    @property
    def local(self) -> tuple[str, int]:
        """Where the supervisor itself and this machine's agent reach it."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "::1" or self.host.startswith("127.")

    @property
    def local_url(self) -> str:
        host, port = self.local
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def allowed_hosts(self) -> str:
        """Names under which pages may be asked for: all of this machine's own."""
        names = ["localhost", "127.0.0.1", "[::1]", self.host, self.local[0]]
        if self.host in ("0.0.0.0", "::"):
            hostname = socket.gethostname()
            names += [hostname, socket.getfqdn()]
            try:
                names += [str(item[4][0]) for item in socket.getaddrinfo(hostname, None, socket.AF_INET)]
            except OSError:
                pass
            names.append(_outward())
        return ",".join(dict.fromkeys(f"[{n}]" if ":" in n and n[0] != "[" else n for n in names if n))


def _outward() -> str:
    """The address of this machine on its default route, '' without one. Sends nothing: it only asks the
    kernel."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def listen(host: str, port: int) -> Address:
    """Open the address, or UpError in one line: taken, not allowed, not this machine's."""
    if not 0 <= port <= 65535:
        raise UpError(f"{port} is no port: give one from 1 to 65535 (0 chooses a free one).")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise UpError(f"{host} is no address that this machine knows.") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(where)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        reason = {
            errno.EADDRINUSE: f"port {port} on {host} is taken by another program; choose one with --port.",
            errno.EACCES: f"port {port} needs more rights; choose one above 1023 with --port.",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine; choose another with --host.",
        }.get(error.errno or 0, f"{host}:{port} cannot be opened: {error.strerror}.")
        raise UpError(reason) from None
    listening.set_inheritable(True)
    bound = listening.getsockname()
    return Address(listening, str(bound[0]), int(bound[1]))
