"""The holder: keeps the memory of finished weights while workers come and go."""
