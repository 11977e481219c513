"""Prompts in either worker: their order, what is there of them already, and how long computing them takes."""
