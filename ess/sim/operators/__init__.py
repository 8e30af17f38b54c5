"""Measured operator tables, and the times of stages made from them."""
