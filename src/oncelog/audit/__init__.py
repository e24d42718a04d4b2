"""Audit stored batches of one partition: sequences, transactions, findings. Pure."""
