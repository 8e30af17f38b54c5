"""Replies as a stream of text, read as they come: one module per format.

stream        what all formats share: a machine of states over a growing text
tagged        replies whose calls are tags
deepseek_v32  DSML, in tags
dots          dots3, in tags
glm           GLM, tags with values beside their names
hermes        calls as JSON: A.X-K2 and Mistral
"""
