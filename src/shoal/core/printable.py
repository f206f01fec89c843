"""Text of unknown origin, made safe to show: a terminal obeys control characters, and does more.

An escape code in a host's name or a file could clear the screen, rename the window, or write other
text over the line before. Characters that turn the direction of writing can also hide text.
"""

from __future__ import annotations

import unicodedata

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories: control, format, surrogate, separators


def printable(text: str, keep: str = "") -> str:
    r"""Escape characters that a terminal would obey, as Python does in a string.

    Args:
        text: any text.
        keep: characters that stay as they are.

    Examples:
        >>> print(printable("h1\x1b[2J"), printable("two\nlines"))
        h1\x1b[2J two\nlines
    """
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode()
        if unicodedata.category(each) in _OBEYED and each not in keep
        else each
        for each in text
    )
