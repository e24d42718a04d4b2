"""Support code that tests share: brokers, clients, topics, waits, and programs that tests kill."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""The folder tests/. With it on PYTHONPATH, a child process can import `support` or run `python -m
support...`.
"""
ROOT = TESTS.parent
