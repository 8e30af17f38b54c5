"""The declarations of routes, the document made from them, and the pages that show it."""
