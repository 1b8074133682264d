"""The worker: one device, its weights, its KV memory, and the execution of step plans."""
