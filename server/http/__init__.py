"""The HTTP application: routes, limits, and what the server says about itself."""
