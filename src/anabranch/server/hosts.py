"""Which Host headers are taken: the defence of a server without a key against web pages of other sites.

A page may send requests to its own host name only. By DNS rebinding its owner points that name to 127.0.0.1, and the
page then talks to the server on its visitor's machine. The browser still sends the name: one that is not known here is
refused. An address cannot be rebound, and every one is taken.
"""

from __future__ import annotations

import ipaddress
import socket

from anabranch.server.settings import Settings, is_loopback


class Hosts:
    def __init__(self, settings: Settings) -> None:
        names = {name.lower().rstrip(".") for name in settings.allowed_hosts}
        self.any = "*" in names or (bool(settings.api_key) and not names)
        """Whoever has the key needs no other proof."""
        names |= {"localhost", settings.host.lower()}
        if not is_loopback(settings.host):  # others reach this machine by its own name
            own = socket.gethostname().lower()
            names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
        self.names = names

    def allow(self, header: str) -> bool:
        """`header` is a Host header's value: a name or an address, with a port or without."""
        if self.any:
            return True
        host = header.strip().lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        elif host.count(":") == 1:
            host = host.partition(":")[0]
        host = host.rstrip(".")
        return host in self.names or host.endswith(".localhost") or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
