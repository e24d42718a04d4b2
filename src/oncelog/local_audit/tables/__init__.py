"""Readers of the tables that an audit compares with a topic."""
