"""The processes. Each folder is one service; none imports another."""
