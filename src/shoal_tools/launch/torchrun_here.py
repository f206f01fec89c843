"""torchrun for ranks of this machine, with a store that listens on 127.0.0.1 only.

    python -m shoal_tools.launch.torchrun_here --nproc-per-node 2 script.py

Why here: `torchrun --standalone` listens on every interface, and its agent reads pickles out of
that store. This is torchrun in all else. The agent meets nobody, and shares its store with its
ranks, as torchrun does.
"""

from __future__ import annotations

import sys
import uuid
from typing import final

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from shoal.contracts.store import open_store

_HERE = "127.0.0.1"
_NAME = "shoal-here"


@final
class _LocalRendezvous(RendezvousHandler):
    """A meeting of one agent, with itself."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = open_store(_HERE)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _NAME

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(_HERE, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


if __name__ == "__main__":
    rendezvous_handler_registry.register(_NAME, _LocalRendezvous)
    main(
        [
            "--nnodes",
            "1",
            "--rdzv-backend",
            _NAME,
            "--rdzv-endpoint",
            _HERE,
            "--rdzv-id",
            uuid.uuid4().hex,
            *sys.argv[1:],
        ]
    )
