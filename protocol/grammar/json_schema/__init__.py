"""What a client's JSON Schema may ask for, and how it is put to the grammar compiler.

``penstock.protocol.grammar.json_schema.check`` is the door: ``refuse`` and ``exact``.
"""
