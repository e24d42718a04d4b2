"""Pages on which a person sees a cluster's transactions, producers and groups; any Kafka cluster will do."""
