"""Decisions about consumer groups: members, generations, assignments, committed offsets."""
