"""The matrix of Kafka clients: what each client does on the wire, seen by the fault proxy.

`clients` builds a program for each client. `scenarios` runs conversations with such a program through the
proxy. `judgements` decides from the recording alone which cell of the matrix follows.
"""
