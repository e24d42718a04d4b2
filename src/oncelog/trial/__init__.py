"""Runs a user's pipeline under a matrix of faults, and counts the rows that each fault loses or doubles.

Each cell of the matrix is one run of the pipeline with one fault. `plan` defines the faults and when each of
them happens. `judgement` counts rows by their ids. These two modules do no I/O. `run` starts the processes.
"""
