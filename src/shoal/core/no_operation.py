"""A call that does nothing, for places that need something to call."""


def nothing() -> None:
    """Do nothing."""
