"""What every WebSocket of this server does alike, whatever is said on it.

aiohttp shakes hands, reads messages and answers pings. ``messages`` makes messages of bytes,
``socket`` writes them and holds what comes in against the budget of bodies, ``session`` reads one
message after another and ends a connection, ``handshake`` begins one. ``request`` counts and logs
how a request on one ends. ``open_sessions`` knows those that are open, so that a server that goes
down can tell them.
"""
