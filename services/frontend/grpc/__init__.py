"""gRPC beside HTTP, in the frontend's process and on its event loop.

``server`` listens, ``call`` is one call from its arrival to its end, ``servicer`` has what can be
called. ``requests`` makes of a message what HTTP would have made of a body, so that both have the
same names, limits and defaults; ``deltas`` and ``stream`` make messages of an answer. ``status``
says errors, ``health`` how the server is.
"""
