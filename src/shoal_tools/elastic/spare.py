"""A process that becomes a rank: it imports PyTorch and Shoal, and waits for its agent's word.

    python -m shoal_tools.elastic.spare FD     a socket to the agent

The word is one line of JSON: environment and command. Then it runs the script as `python script.py`
would. So seconds of imports pass while the crew before still trains. Where no spare is ready, the
agent starts one and gives it its word at once.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import types
from importlib import import_module

_IMPORTED = ("torch", "torch.utils.data", "shoal")


def main(number: int) -> None:
    """Import, wait, and run the script."""
    for name in _IMPORTED:
        import_module(name)
    line = _line(number)
    if not line:  # the agent has ended
        return
    order = json.loads(line)
    os.environ.update(order["environment"])
    command: list[str] = order["command"]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = command[0]
    sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(path))
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, program.__dict__)


def _line(number: int) -> bytes:
    """Read the agent's word byte by byte: what follows it is for `Checkpoints`."""
    own, text = socket.socket(fileno=os.dup(number)), b""
    with own:
        while byte := own.recv(1):
            if byte == b"\n":
                return text
            text += byte
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
