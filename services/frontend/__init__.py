"""HTTP for clients: checks requests, hands them to a ``Gateway``, renders what comes back.

``interface`` is the seam: what lies before it knows HTTP and JSON, what lies behind it (the
gateway) knows the other processes. ``app`` puts the HTTP side together.
"""
