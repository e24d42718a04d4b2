"""The package behind `oncelog demo`: send real flights through injected faults, and count what is lost or
doubled.
"""
