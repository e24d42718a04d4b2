"""One module per API: its versions, its behaviour, and `handle(state, request, now_ms)`."""
