"""Prompts in prefill and decode workers: scheduler, steps, order, known prefixes, and the time for computing."""
