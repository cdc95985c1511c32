"""Which addresses the installation may call for somebody: public ones, and those that an administrator allowed."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

Address = IPv4Address | IPv6Address


def may_be_called(host: str, address: str, allowed: Iterable[object]) -> bool:
    """Whether a host at an address may be called: the address is public, or ``allowed`` has the host, its suffix
    (`.bank.example`) or a network with the address. ValueError for what is no address."""
    entries = [str(entry).lower() for entry in allowed]
    name = host.rstrip(".").lower()
    if any(name == entry or (entry.startswith(".") and name.endswith(entry)) for entry in entries):
        return True
    found = ip_address(address)
    return _public(found) or any(_within(found, entry) for entry in entries)


def literal(host: str) -> str:
    """The host where it is an address itself, "" for a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        return ""


def _public(address: Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_global and not (mapped or address).is_multicast


def _within(address: Address, entry: str) -> bool:
    try:
        return address in ip_network(entry, strict=False)
    except ValueError:
        return False
