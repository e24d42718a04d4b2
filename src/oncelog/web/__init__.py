"""Web pages that show the transactions, producers and groups of any Kafka cluster."""
