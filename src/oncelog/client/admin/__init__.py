"""The admin client: pure modules build requests and read responses; `request_router` sends the requests."""
