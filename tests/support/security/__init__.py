"""Brokers that authenticate, and a request of every API."""
