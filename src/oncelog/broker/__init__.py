"""The broker without I/O: it decides every request, and uses no socket, thread or clock."""
