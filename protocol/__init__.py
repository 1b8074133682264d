"""What the processes say to each other, and the rules they keep while saying it.

``messages`` holds every message, one file a boundary; ``codec`` turns them into frames;
``mailbox`` moves frames; ``membership`` knows who is alive; ``ownership`` decides who owns a
request at every moment; ``config`` and ``sampling`` are declared here because several services
read them.
"""
