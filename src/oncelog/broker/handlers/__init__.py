"""The request handlers, one module per API.

Each module's docstring has the API's versions, behaviour and errors. Its function `handle(state, request,
now_ms)` returns the response, or another `Answer` of `broker.request`, such as a PendingResponse.
"""
