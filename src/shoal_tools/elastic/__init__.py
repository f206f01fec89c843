"""Hosts that come and go: a meeting place, an agent on each host, and crews that train together."""
