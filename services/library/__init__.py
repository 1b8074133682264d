"""The library: a frontend without HTTP, in the user's own Python process."""
