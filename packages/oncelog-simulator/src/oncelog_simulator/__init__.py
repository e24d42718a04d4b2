"""The simulator: the real broker and clients, with time, network, disk and crashes drawn from a seed."""
