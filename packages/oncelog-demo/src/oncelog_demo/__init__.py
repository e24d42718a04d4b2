"""The package behind `oncelog demo`: real flights, injected faults, Spark, and a count of lost and duplicated
records.
"""
