"""Definition of every operation in plain torch: the standard for kernels, and the CPU backend.

Written to be read, not to be fast.
"""

from common.ops.reference.experts import experts as experts
from common.ops.reference.experts import route as route
from common.ops.reference.latent import absorbed_queries as absorbed_queries
from common.ops.reference.latent import expanded as expanded
from common.ops.reference.latent import latent_attention as latent_attention
from common.ops.reference.latent import rotated_queries as rotated_queries
from common.ops.reference.latent import write_latents as write_latents
from common.ops.reference.layers import cache_attention as cache_attention
from common.ops.reference.layers import gate_mul as gate_mul
from common.ops.reference.layers import norm_add as norm_add
from common.ops.reference.layers import paged_attention as paged_attention
from common.ops.reference.layers import qk_norm_rope_kv as qk_norm_rope_kv
from common.ops.reference.layers import rms_norm as rms_norm
from common.ops.reference.layers import rotate as rotate
from common.ops.reference.products import dequantized as dequantized
from common.ops.reference.products import linear as linear
from common.ops.reference.products import multiplied as multiplied
from common.ops.reference.products import quantize as quantize
from common.ops.reference.rows import advance as advance
from common.ops.reference.rows import gather_blocks as gather_blocks
from common.ops.reference.rows import land as land
from common.ops.reference.rows import row_slots as row_slots
from common.ops.reference.rows import update_rows as update_rows
from common.ops.reference.sampling import adjust_logits as adjust_logits
from common.ops.reference.sampling import exponential as exponential
from common.ops.reference.sampling import filter_threshold as filter_threshold
from common.ops.reference.sampling import gumbel as gumbel
from common.ops.reference.sampling import land_logprobs as land_logprobs
from common.ops.reference.sampling import logprobs as logprobs
from common.ops.reference.sampling import philox as philox
from common.ops.reference.sampling import sample as sample
