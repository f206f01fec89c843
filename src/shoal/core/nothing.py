"""A call that does nothing, where there may be something to call."""


def nothing() -> None:
    """Do nothing."""
