"""A test that kills, drains, stops and replaces workers under load, without clients noticing."""
