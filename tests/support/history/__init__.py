"""Concurrent transactional clients whose history a checker judges."""
