"""Requests of an engine, from their arrival to their end.

request    the states of a request, the moves between them, and why it ended
intake     how requests come in, are numbered and are put on the roster
entry      what a request is given before its first token
roster     the requests by state
admission  which of them may run next
followers  choices of one prompt: the first prefills it, the others follow
loads      requests whose cached prompt is read from the disk
"""
