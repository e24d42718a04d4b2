"""`oncelog demo`: real flights through real faults into Spark, and the count of what was lost and doubled."""
