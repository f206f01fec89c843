"""How a site is served: one file a strategy."""
