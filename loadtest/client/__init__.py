"""The load client of ``penstock bench serve``: arrivals, prompts, connections, results."""
