"""The blocks of a page of the documentation: its Python, also what is hidden, and its commands.

```python            runs, one block after the other, as one script
<!-- python … -->    hidden from readers: what they are taken to have, such as a model
```                  every other block; lines that begin with a command are looked at
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<shown>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_COMMANDS = ("shoal", "make", "python", "torchrun", ".venv/bin/shoal")


def script(page: Path) -> str:
    """All Python of a page, each line with the number that it has there."""
    text, lines = page.read_text(), list[str]()
    for block in _BLOCK.finditer(text):
        code = block["hidden"] or (block["shown"] if block["kind"] == "python" else "")
        if code:
            start = text.count("\n", 0, block.start()) + 1
            lines += [""] * (start - len(lines)) + code.splitlines()
    return "\n".join(lines)


def commands(page: Path) -> list[str]:
    """The command lines of a page, without their comments and without sudo."""
    found = []
    for block in _BLOCK.finditer(page.read_text()):
        if block["kind"] in ("", "sh", "bash"):
            for line in (block["shown"] or "").replace("\\\n", " ").splitlines():
                command = line.partition("  #")[0].strip().removeprefix("sudo ")
                if command.startswith(tuple(f"{each} " for each in _COMMANDS)):
                    found.append(command)
    return found
