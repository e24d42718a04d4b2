"""Stories of `oncelog explain`: faults played for real, and their sequence diagrams."""
