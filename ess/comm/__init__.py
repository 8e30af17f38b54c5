"""What the ranks of one group say to one another: links between stages, teams inside a stage.

link      a frame, a way for frames in order, what it means that a peer is lost
team      the ranks of one stage: barrier, gather, exchange
company   the ranks that divide the experts, and what travels between them
experts   which rank has which experts of a layer, and how that follows from measured loads
group     what a rank holds: its links, its team, the beats of its peers
local     a group in one process, by queues
delayed   a link as slow as asked
"""
