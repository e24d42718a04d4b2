"""Runs a user's pipeline under a matrix of faults, and counts the rows that each fault loses or doubles.

Each cell of the matrix is one run of the pipeline with one fault. `plan` defines the faults and the moment of
each. `judgement` counts rows by their ids. Both modules do no I/O. `run` starts the processes.
"""
