"""The node: every request decided here, without sockets, threads or a clock of its own."""
