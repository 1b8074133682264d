"""Load generator, workloads, reports, and models made on the spot."""
