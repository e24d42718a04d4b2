"""Runs a user's pipeline under a matrix of faults, and counts the rows that each fault loses or doubles.

Each cell of the matrix is one run of the pipeline with one fault. `plan` says which faults there are and when
each of them strikes, `judgement` counts rows by their ids. Both are pure. `run` starts the processes.
"""
