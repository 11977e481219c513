"""Prompt steps and decode steps of two processes that share a GPU: their speeds, and what turns cost."""
