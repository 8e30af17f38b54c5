"""Deterministic simulation: whole workers in one thread, over one clock, with faults from a seed.

    python -m tests.campaign --seeds 500

Engines, pools, ports and transports are those that serve. The clock, the copy lanes, the networks
and the order in which workers go on are drawn from the seed, so that a seed plays the same way
again. What fails prints its seed and is cut down to the fewest requests and faults that fail.
"""
