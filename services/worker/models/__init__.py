"""Model families: one small file each, layers from the shared parts in ``decoder``."""
