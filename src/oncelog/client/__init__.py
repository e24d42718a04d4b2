"""Clients without I/O: connection, cluster metadata, fetch and admin logic. `oncelog.edge` drives them."""
