"""Keeps a streaming query of Spark running.

A supervisor starts the query in a child process, restarts it after failures, and stops it between batches.
"""
