"""What every room of the router stands on: checks of JSON, shapes, helper processes."""
