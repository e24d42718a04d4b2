"""The source: offsets to read, and the tasks that read them."""
