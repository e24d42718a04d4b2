"""What code that does I/O shares: clock, threads, event loop, TLS, log events."""
