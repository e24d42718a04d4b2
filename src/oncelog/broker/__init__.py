"""The broker without I/O: it decides every request, with no socket, thread or clock of its own."""
