"""The APIs for clients: checks requests, hands them to a ``Gateway``, renders what comes back.

``penstock.client.gateway_interface`` is the seam: this package knows HTTP, WebSockets, gRPC and
JSON, what lies behind the seam knows the other processes. ``app`` puts the HTTP side together,
``grpc.server`` that of gRPC; ``service`` is the process.
"""
