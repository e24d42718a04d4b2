"""Decisions about limits: quotas, connections and memory."""
