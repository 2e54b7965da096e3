"""`flax.linen` with dtype policies: all that it exports, with layers that obey policies.

Written by `python -m tests.checkers.make_stubs`, from the code of mpmodules.linen and of Flax.
"""

from flax.linen import BatchApply as BatchApply
from flax.linen import DenyList as DenyList
from flax.linen import Fp8DirectDotGeneralOp as Fp8DirectDotGeneralOp
from flax.linen import Fp8DotGeneral as Fp8DotGeneral
from flax.linen import Fp8DotGeneralOp as Fp8DotGeneralOp
from flax.linen import Fp8Einsum as Fp8Einsum
from flax.linen import FrozenDict as FrozenDict
from flax.linen import LogicallyPartitioned as LogicallyPartitioned
from flax.linen import NANOOFp8DotGeneralOp as NANOOFp8DotGeneralOp
from flax.linen import PARTITION_NAME as PARTITION_NAME
from flax.linen import Partitioned as Partitioned
from flax.linen import Variable as Variable
from flax.linen import activation as activation
from flax.linen.transforms import add_metadata_axis as add_metadata_axis
from flax.linen import apply as apply
from flax.linen import attention as attention
from flax.linen import batch_apply as batch_apply
from flax.linen import broadcast as broadcast
from flax.linen import celu as celu
from flax.linen import checkpoint as checkpoint
from flax.linen import combinators as combinators
from flax.linen import combine_masks as combine_masks
from flax.linen import compact as compact
from flax.linen import compact_name_scope as compact_name_scope
from flax.linen import cond as cond
from flax.linen import custom_vjp as custom_vjp
from flax.linen import disable_named_call as disable_named_call
from flax.linen import dtypes as dtypes
from flax.linen import elu as elu
from flax.linen import enable_named_call as enable_named_call
from flax.linen import fold_rngs as fold_rngs
from flax.linen import fp8_ops as fp8_ops
from flax.linen import gelu as gelu
from flax.linen import get_logical_axis_rules as get_logical_axis_rules
from flax.linen import get_partition_spec as get_partition_spec
from flax.linen import get_sharding as get_sharding
from flax.linen import glu as glu
from flax.linen import grad as grad
from flax.linen import hard_sigmoid as hard_sigmoid
from flax.linen import hard_silu as hard_silu
from flax.linen import hard_swish as hard_swish
from flax.linen import hard_tanh as hard_tanh
from flax.linen import init as init
from flax.linen import init_with_output as init_with_output
from flax.linen import initializers as initializers
from flax.linen import intercept_methods as intercept_methods
from flax.linen import jit as jit
from flax.linen import jvp as jvp
from flax.linen import kw_only_dataclasses as kw_only_dataclasses
from flax.linen import leaky_relu as leaky_relu
from flax.linen import linear as linear
from flax.linen import logical_axis_rules as logical_axis_rules
from flax.linen.spmd import logical_to_mesh as logical_to_mesh
from flax.linen.spmd import logical_to_mesh_axes as logical_to_mesh_axes
from flax.linen.spmd import logical_to_mesh_sharding as logical_to_mesh_sharding
from flax.linen import make_attention_mask as make_attention_mask
from flax.linen import make_causal_mask as make_causal_mask
from flax.linen import map_variables as map_variables
from flax.linen import merge_param as merge_param
from flax.linen import meta as meta
from flax.linen import module as module
from flax.linen import named_call as named_call
from flax.linen import normalization as normalization
from flax.linen import nowrap as nowrap
from flax.linen import one_hot as one_hot
from flax.linen import ones as ones
from flax.linen import ones_init as ones_init
from flax.linen import override_named_call as override_named_call
from flax.linen import partitioning as partitioning
from flax.linen import pooling as pooling
from flax.linen import recurrent as recurrent
from flax.linen import relu as relu
from flax.linen import relu6 as relu6
from flax.linen import remat as remat
from flax.linen import remat_scan as remat_scan
from flax.linen import scan as scan
from flax.linen import selu as selu
from flax.linen import set_logical_axis_rules as set_logical_axis_rules
from flax.linen import share_scope as share_scope
from flax.linen import sigmoid as sigmoid
from flax.linen import silu as silu
from flax.linen import soft_sign as soft_sign
from flax.linen import spmd as spmd
from flax.linen import stochastic as stochastic
from flax.linen import summary as summary
from flax.linen import swish as swish
from flax.linen import switch as switch
from flax.linen import tanh as tanh
from flax.linen import transforms as transforms
from flax.linen import unbox as unbox
from flax.linen import value_and_grad as value_and_grad
from flax.linen import vjp as vjp
from flax.linen import vmap as vmap
from flax.linen import while_loop as while_loop
from flax.linen.spmd import with_logical_constraint as with_logical_constraint
from flax.linen import with_logical_partitioning as with_logical_partitioning
from flax.linen import with_partitioning as with_partitioning
from flax.linen import zeros as zeros
from flax.linen import zeros_init as zeros_init
from mpmodules.linen._layers.normalization import BatchNorm as BatchNorm
from mpmodules.linen._layers.recurrent import Bidirectional as Bidirectional
from mpmodules.linen._layers.linear import Conv as Conv
from mpmodules.linen._layers.recurrent import ConvLSTMCell as ConvLSTMCell
from mpmodules.linen._layers.linear import ConvLocal as ConvLocal
from mpmodules.linen._layers.linear import ConvTranspose as ConvTranspose
from mpmodules.linen._layers.linear import Dense as Dense
from mpmodules.linen._layers.linear import DenseGeneral as DenseGeneral
from mpmodules.linen._layers.elementwise import Dropout as Dropout
from mpmodules.linen._layers.linear import Einsum as Einsum
from mpmodules.linen._layers.linear import Embed as Embed
from mpmodules.linen._layers.recurrent import GRUCell as GRUCell
from mpmodules.linen._layers.normalization import GroupNorm as GroupNorm
from mpmodules.linen._layers.normalization import InstanceNorm as InstanceNorm
from mpmodules.linen._layers.recurrent import LSTMCell as LSTMCell
from mpmodules.linen._layers.normalization import LayerNorm as LayerNorm
from mpmodules.linen._layers.recurrent import MGUCell as MGUCell
from mpmodules.linen._module import Module as Module
from mpmodules.linen._layers.attention import MultiHeadAttention as MultiHeadAttention
from mpmodules.linen._layers.attention import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from mpmodules.linen._layers.recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from mpmodules.linen._layers.elementwise import PReLU as PReLU
from mpmodules.linen._layers.normalization import RMSNorm as RMSNorm
from mpmodules.linen._layers.recurrent import RNN as RNN
from mpmodules.linen._layers.recurrent import RNNCellBase as RNNCellBase
from mpmodules.linen._layers.attention import SelfAttention as SelfAttention
from mpmodules.linen._layers.elementwise import Sequential as Sequential
from mpmodules.linen._layers.recurrent import SimpleCell as SimpleCell
from mpmodules.linen._layers.normalization import SpectralNorm as SpectralNorm
from mpmodules.linen._layers.normalization import WeightNorm as WeightNorm
from mpmodules.linen._port import apply_policy as apply_policy
from mpmodules.functions.reductions import avg_pool as avg_pool
from mpmodules.linen._layers.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from mpmodules.linen._layers.dot_product_attention import (
    dot_product_attention_weights as dot_product_attention_weights,
)
from mpmodules.functions.reductions import log_sigmoid as log_sigmoid
from mpmodules.functions.reductions import log_softmax as log_softmax
from mpmodules.functions.reductions import logsumexp as logsumexp
from mpmodules.functions.reductions import max_pool as max_pool
from mpmodules.functions.reductions import standardize as _normalize
from mpmodules.functions.reductions import pool as pool
from mpmodules.functions.reductions import softmax as softmax
from mpmodules.functions.reductions import softplus as softplus
from mpmodules.functions.reductions import standardize as standardize
from mpmodules.linen._summary import tabulate as tabulate

normalize = _normalize
