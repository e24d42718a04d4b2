"""The decisions, one per file: pure functions from state and request to a verdict."""
