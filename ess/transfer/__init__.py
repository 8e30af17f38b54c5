"""What moves between workers: sealed messages, one-sided copies of pages, and counting receivers.

    messages     what is said: fixed structs, each sealed with the shared secret
    members      how workers that hand over together are met
    runs         where bytes lie: regions, runs of neighbouring pages
    transport    how bytes move: the interface, which the transports implement
    arrivals     what has come: the receiver's own count, the only thing it believes

The argument is in docs/adr/0010-what-moves-between-workers.md.
"""
