"""Helpers of tests and checks of the tree."""
