"""Every message, one file a boundary. ``penstock.protocol.codec`` lists them with their tags."""
