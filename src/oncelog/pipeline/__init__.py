"""Keeps a streaming query of Spark running: starts it, again when it failed, and stops it between batches."""
