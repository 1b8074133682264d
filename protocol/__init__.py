"""Everything that two services share: messages, and the rules by which they are exchanged.

``wire`` moves messages: ``wire.messages`` holds all of them, one file a boundary, ``wire.codec``
turns them into frames, ``wire.mailbox`` and ``wire.outbox`` move the frames. ``process`` is what
every process does: its loop, its membership with the router, its logs, metrics and trace.
``ownership`` decides who owns a request at every moment. ``config``, ``sampling`` and ``grammar``
are declared here because several services read them.
"""
