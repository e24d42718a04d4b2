"""Brokers run as processes of their own, for tests, demonstrations and benchmarks: ours and Apache Kafka."""
