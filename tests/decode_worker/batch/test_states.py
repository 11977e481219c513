"""States of rows that were left: their blocks are another's, and a padded step writes nothing there."""

import torch

from common.kernels.base.delta_operands import DeltaWeights
from common.kv.tables import tables_of
from common.ops import delta_rule as law
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from decode_worker.batch.batch import DecodeBatch
from decode_worker.sequences.rows import Clear, Fill
from tests.support.layouts import full, state
from tests.support.sequences import decode_sequence

LAYOUT = KVLayout("model", (full(1, 1, 1, 4, "float32"), state(8)))
WEIGHTS = DeltaWeights(
    conv=torch.ones(6, 1, 4), decay=torch.zeros(1), dt_bias=torch.zeros(1), norm=torch.ones(2), norm_eps=1e-6,
    num_key_heads=1, num_value_heads=1, key_dim=2, value_dim=2, group=1,
)  # fmt: skip
MAX_ROWS = 4
WIDTH = 6 + 2 + 1 + 1  # channels, gate, beta, decay


def test_a_padded_step_leaves_a_block_that_was_leased_again_as_it_is() -> None:
    shape = PoolShape(LAYOUT, (20, 6))
    batch = DecodeBatch(MAX_ROWS, 16, shape, 1000, torch.device("cpu"))
    states = torch.full((6, 1, 1, 1, 8, 4), torch.nan)

    def step() -> None:
        rows = batch.forward_batch(MAX_ROWS)
        table = rows.block_tables[1]
        is_new = law.begin_states(states, table, rows)
        law.delta_rule(torch.ones(MAX_ROWS, WIDTH), WEIGHTS, states[:, 0, 0, 0], table, rows, is_new)

    for row, block in enumerate((1, 2, 3)):
        tables = tables_of(LAYOUT, ([1 + row], [shape.begins[1] + block]))
        batch.apply([Fill(row, decode_sequence(f"r{row}", [7], 1, tables=tables), state_slot=row)])
    step()
    assert not states[1:4].isnan().all(dim=(1, 2, 3, 4, 5)).any(), "each row has written its own state"
    states[3] = torch.nan
    batch.apply([Clear(2)])
    before = states.clone()
    assert batch.forward_batch(MAX_ROWS).block_tables[1][2] == 3, "the padding row still names it"
    step()  # the other rows run the same token again
    torch.testing.assert_close(states, before, equal_nan=True)
