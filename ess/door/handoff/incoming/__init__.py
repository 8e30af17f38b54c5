"""Handoffs that arrive.

receiver  room for prompts, the count of what has come, and what became of each
arriving  one of them: its sequence, its pages, and a leg from each worker that brings a part
leg       what one worker brings, and when to speak of it again
legs      all legs: asked for, counted, settled with the peer
origins   which workers a prompt comes from
"""
