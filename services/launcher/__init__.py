"""``penstock serve``: starts every process of a server, watches them, and stops them in order."""
