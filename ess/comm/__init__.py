"""Communication between the ranks of a group: links between stages, teams inside a stage.

link      frames sent in order to one peer, and what happens when the peer is lost
team      the ranks of one stage: barrier, gather, exchange
experts   the ranks that divide the experts, what they send one another, and which rank has which
          experts of a layer, by measured loads
group     what a rank holds: its links, its team, its peers' heartbeats
local     a group in one process, over queues
delayed   a link slowed down to a given latency and rate
"""
