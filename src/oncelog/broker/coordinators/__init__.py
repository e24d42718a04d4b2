"""Coordinators of groups and transactions, and the internal topics that keep their state."""
