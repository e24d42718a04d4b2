"""The pytest fixture `oncelog_broker`: a real broker on a free port, gone after the test."""
