"""Store where ranks meet: a TCP server that listens no wider than its address says.

Why here: both launchers and ranks make one, and PyTorch's own listens on every interface.

    an address as numbers, or localhost    there only
    a name                                 on every interface, as it may mean another one elsewhere
    an address that this host has not      on every interface: others reach it by translation
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import socket

from torch.distributed import TCPStore

from shoal.core.interfaces import is_loopback

_LOCAL = "localhost"


def open_store(address: str, port: int = 0, timeout_s: float = 300.0) -> TCPStore:
    """Open a store in this process. It lives as long as it is referenced.

    Args:
        address: the address at which other processes reach it.
        port: 0 for any free port.
        timeout_s: the longest time that a read may wait.

    Raises:
        OSError: it cannot listen there.
        DistError: it cannot listen there, or no process can connect.
    """
    listening = _listening(address, port)
    return TCPStore(
        address,
        listening.getsockname()[1] if listening else port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,  # the store's from now on
    )


def _listening(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at that address only; None if it should be on every
    interface.
    """
    if not (_is_numbers(address) or address == _LOCAL):
        return None
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL and not is_loopback(str(place[0])):
            return None
        raise
    return listening


def _is_numbers(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
