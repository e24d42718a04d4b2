"""Topics, programs and faults for the tests of Spark."""
