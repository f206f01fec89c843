"""Where ranks meet: a key-value store in the launcher, and the environment variables that lead
there.

Why here: under plain env:// rendezvous rank 0 holds the store, and all that was written is lost
when rank 0 dies. Torchrun's agent holds it instead, and one variable tells ranks so; Shoal's
launchers do the same.
"""

from __future__ import annotations

import json

from torch.distributed import TCPStore

from shoal.contracts.launcher import VERDICT, scope


def new_store(address: str) -> TCPStore:
    """A store that listens on a free port of every address here, `address` among them, while it is
    referenced.
    """
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


def variables(
    address: str, port: int, rank: int, ranks: int, local_rank: int, local_ranks: int
) -> dict[str, str]:
    """What torchrun would set for this rank, with the store at `address` and `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank joins the store, and none makes one
    }


def agreed(store: TCPStore) -> tuple[str, int | None] | None:
    """What the ranks agreed on to have befallen the job, and the rank that failed, if one did; None
    if nothing has.
    """
    key = f"{scope()}/{VERDICT}"
    if not store.check([key]):
        return None
    verdict = json.loads(store.get(key))
    return verdict["what"], verdict["rank"]
