"""The APIs that the frontend speaks: each a rendering of one vocabulary of events."""
