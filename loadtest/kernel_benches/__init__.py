"""``penstock bench kernels``: the kernels' cases, and how one is timed."""
