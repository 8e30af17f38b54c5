"""Workers that are killed, or stand still, at any call of their transport.

python -m tests.pd.stops --every 53
"""
