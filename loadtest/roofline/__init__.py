"""What a device can do at most, and what a model's work costs at least."""
