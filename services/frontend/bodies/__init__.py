"""What the routes take and give, declared: requests, answers, chunks of streams, errors."""
