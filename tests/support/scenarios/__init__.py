"""The scenarios of tests/scenarios/*.md: reader, steps and comparison."""
