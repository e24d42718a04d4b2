"""Keeps a streaming query of Spark running: starts it, restarts it after failures, and stops it between
batches.
"""
