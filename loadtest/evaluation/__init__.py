"""``penstock eval``: held-out questions to a server, and plain facts."""
