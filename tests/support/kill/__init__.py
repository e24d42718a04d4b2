"""Processes that tests kill."""
