"""Files into a topic, exactly once over any number of runs (row P4)."""
