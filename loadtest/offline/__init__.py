"""Measurements of the library and its executor: throughput, latency, prefill, steps, start."""
