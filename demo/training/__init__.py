"""What made the built-in model, its adapter and its draft head: in the source tree alone."""
