"""Brokers that authenticate their clients, and a request of every API."""
