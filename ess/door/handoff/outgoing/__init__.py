"""Handoffs that leave.

sender     pages of a layer as they are made, to where they are awaited
departure  one of them: whose rows, how far they are made, and where the receiver wants them
orphans    reservations whose request has not come
pages      where the pages come from: a sequence of ours, or another engine
packed     memory from which windows and parts of states leave
units      the parts of one kind: which may leave, are on their way, have come
transfers  the parts that are due, each with the Piece that names it
"""
