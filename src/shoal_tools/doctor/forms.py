"""Words of a proposed command, each checked for its form.

Hosts tell each other their addresses, interfaces and names, and people paste the resulting command
into a root shell. So a word that does not have the form of an address, an interface and so on is
left out. A word in capitals replaces it, which the reader has to fill in.
"""

from __future__ import annotations

import ipaddress
import re

_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")  # Linux has at most 15 characters
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}")


def address(text: str) -> str:
    """Return an IP address, perhaps with its interface after a %, or ADDRESS."""
    bare, percent, scope = text.partition("%")
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return "ADDRESS"
    return text if not percent or _INTERFACE.fullmatch(scope) else "ADDRESS"


def interface(text: str) -> str:
    """Return the name of a network interface, or INTERFACE."""
    return text if _INTERFACE.fullmatch(text) else "INTERFACE"


def name(text: str) -> str:
    """Return the name of a host or of a table of its firewall, or NAME."""
    return text if _NAME.fullmatch(text) else "NAME"


def host(text: str) -> str:
    """Return a host's name or address, or HOST."""
    return text if _NAME.fullmatch(text) or address(text) == text else "HOST"


def version(text: str) -> str:
    """Return a version in the form for pip and uv, or VERSION."""
    return text if _VERSION.fullmatch(text) else "VERSION"
