"""How many files and connections a process may have open.

Why here: the usual soft limit is 1024, and a thousand connections of strangers who say nothing
would keep ranks out of the store and of each other's ports. The hard limit is the machine's own.
"""

from __future__ import annotations

import resource
from contextlib import suppress

_ENOUGH = 1 << 16


def raise_limit() -> None:
    """Raise the soft limit to 65536, or as far as the hard one lets it; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # where a sandbox forbids it all stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
