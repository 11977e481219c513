"""The protocol of operations, and the values that they take."""

from common.ops.base.experts import ExpertWeights as ExpertWeights
from common.ops.base.experts import Router as Router
from common.ops.base.experts import Routing as Routing
from common.ops.base.floats import float_codes as float_codes
from common.ops.base.floats import float_elements as float_elements
from common.ops.base.floats import scale_bytes as scale_bytes
from common.ops.base.operations import Activation as Activation
from common.ops.base.operations import AttentionWeights as AttentionWeights
from common.ops.base.operations import DecodeWork as DecodeWork
from common.ops.base.operations import DeltaWeights as DeltaWeights
from common.ops.base.operations import ForwardBatch as ForwardBatch
from common.ops.base.operations import GroupCache as GroupCache
from common.ops.base.operations import LatentWeights as LatentWeights
from common.ops.base.operations import Norm as Norm
from common.ops.base.operations import Ops as Ops
from common.ops.base.operations import Residual as Residual
from common.ops.base.operations import RowsWork as RowsWork
from common.ops.base.operations import StateWork as StateWork
from common.ops.base.packing import pack as pack
from common.ops.base.packing import unpack as unpack
from common.ops.base.quarters import pack_quarters as pack_quarters
from common.ops.base.quarters import unpack_quarters as unpack_quarters
from common.ops.base.weight import BLOCK as BLOCK
from common.ops.base.weight import Scheme as Scheme
from common.ops.base.weight import Weight as Weight
