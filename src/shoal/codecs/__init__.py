"""How values travel in fewer bytes: one file a codec, and what has an exchange carry its codes."""
