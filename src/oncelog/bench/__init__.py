"""`oncelog bench`: measurements that one command repeats, as JSON, a table and a picture.

A measurement is a module with a plan (what runs, interleaved), raw samples, and their medians; its
section of docs/benchmarks.md is rendered from the JSON it left in bench/results/.
"""
