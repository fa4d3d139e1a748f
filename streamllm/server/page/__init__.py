"""The page at ``/``: a chat, and the engine's memory and figures as they change."""
