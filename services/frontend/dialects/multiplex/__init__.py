"""/v1/stream: several chats and completions at once on one WebSocket.

``encodings`` reads and writes frames as JSON or msgpack, ``renderer`` makes frames of the events of
an answer. ``session`` is a connection, ``request`` one request on it; ``dialect`` is the route.
"""
