"""The protocol by which public gateways drive an engine: tokens in, tokens out.

Names and numbers are those of the services ``vllm.grpc.engine.VllmEngine`` and
``smg.grpc.common``, of which these files hold what Penstock answers or must refuse by name.
"""
