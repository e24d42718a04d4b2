"""The source: the offsets that a query reads, and the tasks that read them."""
