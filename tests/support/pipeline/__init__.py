"""Pipelines of examples/ and a child for the supervisor."""
