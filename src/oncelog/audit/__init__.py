"""Audit the stored batches of one partition: sequences, transactions and findings. No I/O."""
