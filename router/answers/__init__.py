"""Responses, whole and streamed, in the shape of each API."""
