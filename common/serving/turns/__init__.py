"""Turns of prompts and decode steps on a GPU that both share: when, how long, and how the two workers agree."""
