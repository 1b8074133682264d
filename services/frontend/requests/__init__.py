"""What becomes of each request: kept for a while, and told to whom it belongs."""
