"""The version of Baton, where a source tree that was never installed finds it, too."""

VERSION = "0.1.0"
