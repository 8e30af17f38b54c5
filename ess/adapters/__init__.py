"""Engines of others that feed ESS workers, or run over ESS pools."""
