"""What tests share: brokers, clients, topics, waits, and the programs that tests kill."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""On PYTHONPATH a child process can run `python -m support...` or import it."""
ROOT = TESTS.parent
