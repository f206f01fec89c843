"""Number of files and connections that a process may have open.

Why here: the usual soft limit is 1024. A thousand connections of silent strangers would use that
up, and keep ranks out of the store and of each other's ports. The hard limit is the machine's own.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

from shoal.core.errors import UsageError

_ENOUGH = 1 << 16
# a process with a plain plan has fewer files open, and no job can run with less
_LEAST, _LEAST_A_RANK = 32, 3
MORE_FILES = (
    "raise the limit in the shell or service that starts the ranks: `ulimit -n 4096`, LimitNOFILE= "
    "of systemd, --ulimit nofile= of docker, or nofile in /etc/security/limits.conf"
)


def raise_limit() -> None:
    """Raise the soft limit to 65536, or as far as the hard one lets it; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # if a sandbox forbids it, the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_limit(ranks: int, where: str) -> None:
    """Refuse a limit with which so many ranks cannot even connect.

    Raises:
        UsageError: the limit is too low. It says how high it must be, and how to raise it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _LEAST + _LEAST_A_RANK * ranks
    if soft != resource.RLIM_INFINITY and soft < least:
        raise too_few(where, f"at least {least} for {ranks} ranks")


def too_few(where: str = "", expected: str = "some 32, and 16 for each rank") -> UsageError:
    """Return the error that this process may open too few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UsageError(
        "this process may have too few files and connections open at once",
        where=where,
        got=f"a limit of {soft}, which it may raise to {hard}",
        expected=expected,
        do=MORE_FILES,
    )


def ran_out(error: BaseException | str) -> bool:
    """Return whether an error, or its words, say that a process has too many files open."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return os.strerror(errno.EMFILE) in str(error)
