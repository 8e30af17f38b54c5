"""Moving rows between workers: sealed messages, one-sided copies of pages, counting receivers.

    messages     what workers tell one another: fixed structs, sealed with the shared secret
    members      how a worker connects to a group of workers that hand over together
    runs         memory that transfers use: regions, runs of neighbouring pages
    transport    how bytes move: the interface of all transports
    arrivals     what has come: the receiver's own count, the only thing it believes

The argument is in docs/adr/0010-prefill-pushes-pages-decode-counts-them.md.
"""
