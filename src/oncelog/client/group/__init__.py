"""A consumer's membership in its group, in the classic protocol and in the consumer protocol (KIP-848)."""
