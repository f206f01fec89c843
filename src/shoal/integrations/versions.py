"""The versions of other trainers that an adapter is tested with."""

from __future__ import annotations

import re

from shoal.core.errors import UsageError


def check_version(
    package: str, version: str, least: tuple[int, ...], below: tuple[int, ...]
) -> None:
    """Raise UsageError if a package's version is outside of a range.

    >>> check_version("accelerate", "1.15.0", (1, 15), (2,))
    """
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
    if not least <= numbers < below:
        low, high = (".".join(map(str, bound)) for bound in (least, below))
        raise UsageError(
            f"this adapter was not made for this version of {package}",
            got=f"{package} {version}",
            expected=f"at least {low}, and below {high}",
            do=f"pip install '{package}>={low},<{high}'",
        )
