"""The stories of `oncelog explain`: a producer and a broker under real faults, with sequence diagrams."""
