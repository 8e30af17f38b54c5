"""Predictions from measured operators beside public measurements of servings."""
