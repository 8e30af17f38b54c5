"""Overlap orders: the stages of a layer as schedules that hide the fetch."""
