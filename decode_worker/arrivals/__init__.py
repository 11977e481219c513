"""Requests on their way into the batch: announced, offered, pulled, or computed here."""
