"""The only room with sockets, files, threads and the real clock."""
