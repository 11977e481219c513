"""What a client may ask: tables of fields, and checked requests."""
