"""Decisions about groups: members, generations, assignments, committed offsets."""
