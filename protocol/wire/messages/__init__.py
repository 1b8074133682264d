"""Every message, a file a boundary. ``penstock.protocol.wire.codec`` has their tags."""
