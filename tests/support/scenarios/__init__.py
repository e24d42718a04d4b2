"""Steps that only scenarios of tests use: requests of groups, and stops and starts of brokers."""
