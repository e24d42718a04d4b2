"""Fuzz targets and their seeds."""
