"""An agent that speaks to its launcher and has no ranks, so that it starts at once.

    python speaking_agent.py FOLDER

It leaves a file for each crew, HOST-NUMBER with its pid, and ends its work once the file `end` is
there. A host with a file HOST-cannot ends with 3, before it says a word.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

HERE, ME = os.environ["SHOAL_HOST"], f"{os.environ['SHOAL_HOST']}-{os.getpid()}"
FOLDER = Path(sys.argv[1])
LINE = socket.socket(fileno=0)
TERMS = {"least": 1, "most": 2, "wait_s": 20, "restarts": 0}


def tell(kind: str, **words: object) -> None:
    """Tell the launcher."""
    LINE.sendall(json.dumps({"type": kind, **words}).encode() + b"\n")


def hello() -> None:
    """Say hello."""
    own = {"agent": ME, "host": HERE, "slots": 1, "address": "127.0.0.1", "reached": "", "port": 1}
    tell("Hello", **own, terms=TERMS)


def ended(outcome: str) -> None:
    """Say that the ranks have ended."""
    if crews:
        tell("CrewEnded", number=crews.pop(), outcome=outcome, port=1)


def lives() -> None:
    """Give signs of life, and end the work when it is time."""
    while True:
        time.sleep(0.1)
        tell("Sign")
        if (FOLDER / "end").exists():
            ended("done")


def leave(number: int, frame: object) -> None:
    """Leave as the launcher says."""
    print("is told to leave", flush=True)
    tell("Leave")
    leaves.append(number)


if (FOLDER / f"{HERE}-cannot").exists():
    sys.exit(3)
crews: list[int] = []
leaves: list[int] = []
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, leave)
hello()
threading.Thread(target=lives, daemon=True).start()
for text in LINE.makefile("r"):
    said = json.loads(text or "null") if text.strip() else {"type": "again"}
    if said["type"] == "again":
        hello()
    elif said["type"] == "Train":
        crew = said["crew"]
        crews.append(crew["number"])
        names = ", ".join(member["host"] for member in crew["members"])
        print(f"crew {crew['number']}: {names}", flush=True)
        (FOLDER / f"{HERE}-{crew['number']}").write_text(str(os.getpid()))
    elif said["type"] in ("Halt", "Commit"):
        ended("halted" if said["type"] == "Halt" else "committed")
        if leaves:
            sys.exit(0)
    elif said["type"] == "JobOver":
        sys.exit(said["code"])
