"""Concurrent transactional clients, whose recorded history a checker verifies."""
