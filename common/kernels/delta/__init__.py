"""Gated delta rule: a state of each head in place of keys and values. Laws are in `common.ops.delta_rule`."""
