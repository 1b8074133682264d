"""What a client's JSON Schema may ask for, and how it is put to the grammar compiler.

The entry points are ``refuse`` and ``exact`` of ``penstock.protocol.grammar.json_schema.check``.
"""
