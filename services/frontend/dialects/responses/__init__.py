"""OpenAI's Responses API: /v1/responses over HTTP and WebSocket.

An answer is a list of items (thinking, a message, calls of tools), and so is an input: what was
answered can be given back. ``items`` reads an input, ``prompt`` makes a prompt of it, ``tools``
what a model is offered; ``turn`` checks a whole body. ``output`` makes items of the events that
come, ``renderer`` the events and the response. ``store`` keeps responses and ``conversations``
finds what one continues; ``handlers`` serves HTTP, ``session`` the lanes of a WebSocket.
"""
