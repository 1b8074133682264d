"""``penstock trace``: what every process of a server does, on one timeline."""
