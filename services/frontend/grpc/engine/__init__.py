"""What gateways drive an engine by (``protocol/grpc/engine``): tokens in, tokens out.

``requests`` reads, ``chunks`` writes, ``servicer`` has what can be called.
"""
