"""Formats in which models write thoughts and tool calls: texts around them, and incremental readers of each format."""
