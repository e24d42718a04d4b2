"""The Kafka clients: producer, consumer, consumer groups and admin, and the connections that they share."""
