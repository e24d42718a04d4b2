"""The stories of `oncelog explain`: real faults with a producer and a broker, and their sequence diagrams."""
