"""Everything that two services share: messages, and the rules by which they are exchanged.

``messages`` holds every message, one file a boundary; ``codec`` turns them into frames;
``mailbox`` and ``outbox`` move frames; ``participant`` is a process's membership with the router;
``runtime`` runs a service's loop; ``ownership`` decides who owns a request at every moment;
``config``, ``sampling`` and ``grammar`` are declared here because several services read them.
"""
