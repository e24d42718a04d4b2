"""Concurrent transactional clients whose operations are recorded. A checker then verifies this history."""
