"""Prompts in prefill and decode workers: order, known prefixes, and the time for computing."""
