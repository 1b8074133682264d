"""Models and adapters with random weights, made on the spot."""
