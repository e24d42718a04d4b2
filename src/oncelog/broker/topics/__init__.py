"""The broker's topics: their list, their settings, and directories taken over from Apache Kafka."""
