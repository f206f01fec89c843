"""A rank that fails once the rank of host a is there."""

import pathlib
import sys
import time

from shoal.comm.rendezvous import crew

own = crew()
assert own is not None
while not (pathlib.Path(sys.argv[1]) / f"a-{own[1]}").exists():
    time.sleep(0.02)
sys.exit(7)
