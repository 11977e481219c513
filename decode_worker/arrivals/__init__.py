"""Requests on the way into the batch: announced, offered, pulled, or computed here."""
