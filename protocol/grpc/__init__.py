"""The API for gRPC, as files that other languages read, and as Python made of them.

``penstock.proto`` is Penstock's own API, ``engine/`` what gateways drive an engine by. The modules
``*_pb2`` and ``*_pb2_grpc`` are made of them by ``make protos`` and kept here, so that nobody needs
a compiler to install or to write a client; a test holds them equal. They need the extra ``grpc``.
"""
