"""Steps that only scenarios of tests have: about groups, and about brokers that are stopped and started."""
