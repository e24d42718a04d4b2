"""Group members and coordinators for tests."""
