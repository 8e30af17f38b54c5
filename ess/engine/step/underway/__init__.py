"""Steps under way, and what the host has not learned of them yet.

flights        the steps: launched at a pace, learned in order
future         counts and tokens that are not on the host yet
device_future  the same on a device
uploads        small inputs on their way to a device
audit          what must hold between requests, steps under way and the future map
"""
