"""Decisions about security: authentication states, principals, ACLs."""
