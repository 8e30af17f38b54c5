"""How the ranks of one group communicate: links between stages, teams inside a stage.

link      frames sent in order to one peer, and what happens when the peer is lost
team      the ranks of one stage: barrier, gather, exchange
company   the ranks that divide the experts, and what they send one another
experts   which rank has which experts of a layer, by measured loads; the exchanges of a device
group     what a rank holds: its links, its team, its peers' heartbeats
local     a group in one process, over queues
delayed   a link slowed down to a given latency and rate
"""
