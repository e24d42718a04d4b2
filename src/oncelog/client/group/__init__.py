"""A consumer's membership in its group, in both group protocols."""
