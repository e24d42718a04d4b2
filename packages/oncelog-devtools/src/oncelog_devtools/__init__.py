"""Oncelog, Apache Kafka and Spark as separate processes, for tests, demonstrations and benchmarks."""
