"""What every service is made of: its loop, its membership, its logs, metrics and traces."""
