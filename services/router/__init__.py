"""The router: who is alive, and where a new request goes. It sees requests, never tokens."""
