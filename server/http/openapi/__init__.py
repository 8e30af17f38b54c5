"""The routes as they are declared, the document made of them, and the pages that show it."""
