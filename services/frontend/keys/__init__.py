"""Who may call, what for, and how much: keys, roles and limits, the same for every API."""
