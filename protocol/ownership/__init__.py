"""Who owns a request at every moment, as state machines without sockets and clocks.

ZeroMQ promises no delivery, so these rules do: every request, choice and attempt has its number;
what is not answered is sent again; receivers drop what they know and cancel what they do not
want; what two neighbours hold open is compared every two seconds. Each machine is fed messages
and the time and sends through a function, so that the same code runs over real mailboxes and over
the simulated network of the tests.
"""
