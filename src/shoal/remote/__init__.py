"""Messages to hosts that do not train: servers, and hosts that run the end of a model."""
