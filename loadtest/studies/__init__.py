"""Comparisons, simulations and costs, each a program: in the source tree, not in the wheel."""
