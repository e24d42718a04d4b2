"""The broker without I/O. It handles every request, and uses no socket, thread or clock."""
