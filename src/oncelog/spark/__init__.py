"""Spark reads and audits Kafka-protocol clusters through this room: options, offsets, source, audit."""
