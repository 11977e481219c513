"""Foundations shared by all router packages: checks of JSON, shapes of responses, helper processes."""
