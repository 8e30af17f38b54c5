"""Rows that move from the worker that made them to the worker that decodes with them.

geometry     where pages and windows lie in registered memory
receiver     room for a prompt, and the count of what has come
sender       pages as they are made, layer by layer, then what is kept beside them
transfers    which of them leave next, and what is under way
port         both behind one transport
"""
