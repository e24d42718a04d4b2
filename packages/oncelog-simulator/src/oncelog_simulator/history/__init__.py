"""Check a history of what clients sent and saw against what transactions allow."""
