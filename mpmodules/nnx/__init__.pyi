"""`flax.nnx` with dtype policies: all that it exports, with layers that obey policies.

Written by `python -m tests.checkers.make_stubs`, from the code of mpmodules.nnx and of Flax.
"""

import collections.abc as _abc
import typing as _typing

import flax.nnx as _nnx
import flax.nnx.filterlib as _filterlib
import flax.nnx.nn.recurrent as _recurrent
import flax.typing as _types
import jax as _jax

from policy.core.policy import Policy as _Policy
from flax.nnx import A as A
from flax.nnx import All as All
from flax.nnx import Any as Any
from flax.nnx import BatchStat as BatchStat
from flax.nnx import Cache as Cache
from flax.nnx import Carry as Carry
from flax.nnx import Data as Data
from flax.nnx import Dict as Dict
from flax.nnx import DiffState as DiffState
from flax.nnx import Everything as Everything
from flax.nnx import FlatState as FlatState
from flax.nnx import GraphDef as GraphDef
from flax.nnx import GraphState as GraphState
from flax.nnx import Initializer as Initializer
from flax.nnx import Intermediate as Intermediate
from flax.nnx import List as List
from flax.nnx import LoRAParam as LoRAParam
from flax.nnx import M as M
from flax.nnx import MergeContext as MergeContext
from flax.nnx import Metric as Metric
from flax.nnx import MultiMetric as MultiMetric
from flax.nnx import NodeStates as NodeStates
from flax.nnx import Not as Not
from flax.nnx import Nothing as Nothing
from flax.nnx import Object as Object
from flax.nnx import OfType as OfType
from flax.nnx import OptArray as OptArray
from flax.nnx import OptState as OptState
from flax.nnx import OptVariable as OptVariable
from flax.nnx import PARTITION_NAME as PARTITION_NAME
from flax.nnx import Param as Param
from flax.nnx import PathContains as PathContains
from flax.nnx import Perturbation as Perturbation
from flax.nnx import PureState as PureState
from flax.nnx import Pytree as Pytree
from flax.nnx import RngCount as RngCount
from flax.nnx import RngKey as RngKey
from flax.nnx import RngState as RngState
from flax.nnx import RngStream as RngStream
from flax.nnx import Rngs as Rngs
from flax.nnx import SplitContext as SplitContext
from flax.nnx import State as State
from flax.nnx import StateAxes as StateAxes
from flax.nnx import StateSharding as StateSharding
from flax.nnx import Static as Static
from flax.nnx import TrainState as TrainState
from flax.nnx import UpdateContext as UpdateContext
from flax.nnx import Variable as Variable
from flax.nnx import VariableMetadata as VariableMetadata
from flax.nnx import VariableState as VariableState
from flax.nnx import WithTag as WithTag
from flax.nnx import abstract_with_sharding as abstract_with_sharding
from flax.nnx import as_abstract as as_abstract
from flax.nnx import as_pure as as_pure
from flax.nnx import bridge as bridge
from flax.nnx import cached_partial as cached_partial
from flax.nnx import call as call
from flax.nnx import capture as capture
from flax.nnx import celu as celu
from flax.nnx import check_pytree as check_pytree
from flax.nnx import checkify as checkify
from flax.nnx import clone as clone
from flax.nnx import combine_masks as combine_masks
from flax.nnx import compat as compat
from flax.nnx import cond as cond
from flax.nnx import current_update_context as current_update_context
from flax.nnx import custom_vjp as custom_vjp
from flax.nnx import data as data
from flax.nnx import dataclass as dataclass
from flax.nnx import deprecations as deprecations
from flax.nnx import display as display
from flax.nnx import elu as elu
from flax.nnx import eval_shape as eval_shape
from flax.nnx import extract as extract
from flax.nnx import filter_state as filter_state
from flax.nnx import filterlib as filterlib
from flax.nnx import find_duplicates as find_duplicates
from flax.nnx import flatten as flatten
from flax.nnx import fori_loop as fori_loop
from flax.nnx import fork_rngs as fork_rngs
from flax.nnx import from_flat_state as from_flat_state
from flax.nnx import from_tree as from_tree
from flax.nnx import gelu as gelu
from flax.nnx import get_abstract_model as get_abstract_model
from flax.nnx import get_named_sharding as get_named_sharding
from flax.nnx import get_partition_spec as get_partition_spec
from flax.nnx import glu as glu
from flax.nnx import graph as graph
from flax.nnx import graphdef as graphdef
from flax.nnx import graphlib as graphlib
from flax.nnx import hard_sigmoid as hard_sigmoid
from flax.nnx import hard_silu as hard_silu
from flax.nnx import hard_swish as hard_swish
from flax.nnx import hard_tanh as hard_tanh
from flax.nnx import has_data as has_data
from flax.nnx import helpers as helpers
from flax.nnx import identity as identity
from flax.nnx import ids as ids
from flax.nnx import initializers as initializers
from flax.nnx import is_data as is_data
from flax.nnx import iter_children as iter_children
from flax.nnx import iter_graph as iter_graph
from flax.nnx import iter_module_children as iter_module_children
from flax.nnx import iter_modules as iter_modules
from flax.nnx import jit as jit
from flax.nnx import jit_partial as jit_partial
from flax.nnx import jvp as jvp
from flax.nnx import leaky_relu as leaky_relu
from flax.nnx import logical_axis_rules as logical_axis_rules
from flax.nnx import make_attention_mask as make_attention_mask
from flax.nnx import make_causal_mask as make_causal_mask
from flax.nnx import make_jaxpr as make_jaxpr
from flax.nnx import map as map
from flax.nnx import map_state as map_state
from flax.nnx import merge as merge
from flax.nnx import merge_context as merge_context
from flax.nnx import merge_state as merge_state
from flax.nnx import metrics as metrics
from flax.nnx import module as module
from flax.nnx import nn as nn
from flax.nnx import object as object
from flax.nnx import one_hot as one_hot
from flax.nnx import optimizer as optimizer
from flax.nnx import pmap as pmap
from flax.nnx import pop as pop
from flax.nnx import prefix as prefix
from flax.nnx import proxy_caller as proxy_caller
from flax.nnx import pure as pure
from flax.nnx import pytreelib as pytreelib
from flax.nnx import recursive_map as recursive_map
from flax.nnx import register_data_type as register_data_type
from flax.nnx import register_variable_name as register_variable_name
from flax.nnx import relu as relu
from flax.nnx import relu6 as relu6
from flax.nnx import remat as remat
from flax.nnx import replace_by_pure_dict as replace_by_pure_dict
from flax.nnx import reprlib as reprlib
from flax.nnx import reseed as reseed
from flax.nnx import restore_int_paths as restore_int_paths
from flax.nnx import restore_rngs as restore_rngs
from flax.nnx import rnglib as rnglib
from flax.nnx import scan as scan
from flax.nnx import selu as selu
from flax.nnx import set_graph_mode as set_graph_mode
from flax.nnx import set_graph_updates as set_graph_updates
from flax.nnx import set_metadata as set_metadata
from flax.nnx import shard_map as shard_map
from flax.nnx import sigmoid as sigmoid
from flax.nnx import silu as silu
from flax.nnx import soft_sign as soft_sign
from flax.nnx import split as split
from flax.nnx import split_context as split_context
from flax.nnx import split_rngs as split_rngs
from flax.nnx import split_state as split_state
from flax.nnx import spmd as spmd
from flax.nnx import state as state
from flax.nnx import statelib as statelib
from flax.nnx import static as static
from flax.nnx import summary as summary
from flax.nnx import swish as swish
from flax.nnx import switch as switch
from flax.nnx import tanh as tanh
from flax.nnx import to_flat_state as to_flat_state
from flax.nnx import to_pure_dict as to_pure_dict
from flax.nnx import to_tree as to_tree
from flax.nnx import tracers as tracers
from flax.nnx import training as training
from flax.nnx import transform_metadata as transform_metadata
from flax.nnx import transforms as transforms
from flax.nnx import traversals as traversals
from flax.nnx import unflatten as unflatten
from flax.nnx import unpack as unpack
from flax.nnx import update as update
from flax.nnx import update_context as update_context
from flax.nnx import use_eager_sharding as use_eager_sharding
from flax.nnx import using_eager_sharding as using_eager_sharding
from flax.nnx import var_defaults as var_defaults
from flax.nnx import variable_name_from_type as variable_name_from_type
from flax.nnx import variable_type_from_name as variable_type_from_name
from flax.nnx import variablelib as variablelib
from flax.nnx import variables as variables
from flax.nnx import vars_as as vars_as
from flax.nnx import view as view
from flax.nnx import view_info as view_info
from flax.nnx import visualization as visualization
from flax.nnx import vjp as vjp
from flax.nnx import vmap as vmap
from flax.nnx import while_loop as while_loop
from flax.nnx import with_attributes as with_attributes
from flax.nnx import with_metadata as with_metadata
from flax.nnx import with_partitioning as with_partitioning
from flax.nnx import with_rngs as with_rngs
from flax.nnx import with_vars as with_vars
from flax.nnx import wrappers as wrappers
from mpmodules.nnx._layers.normalization import BatchNorm as _BatchNorm
from mpmodules.nnx._layers.recurrent import Bidirectional as _Bidirectional
from mpmodules.nnx._layers.linear import Conv as _Conv
from mpmodules.nnx._layers.linear import ConvTranspose as _ConvTranspose
from mpmodules.nnx._layers.elementwise import Dropout as _Dropout
from mpmodules.nnx._layers.newer_flax import EMA as EMA
from mpmodules.nnx._layers.linear import Einsum as _Einsum
from mpmodules.nnx._layers.linear import Embed as _Embed
from mpmodules.nnx._layers.recurrent import GRUCell as _GRUCell
from mpmodules.nnx._layers.normalization import GroupNorm as _GroupNorm
from mpmodules.nnx._layers.normalization import InstanceNorm as _InstanceNorm
from mpmodules.nnx._layers.recurrent import LSTMCell as _LSTMCell
from mpmodules.nnx._layers.normalization import LayerNorm as _LayerNorm
from mpmodules.nnx._layers.linear import Linear as _Linear
from mpmodules.nnx._layers.linear import LinearGeneral as _LinearGeneral
from mpmodules.nnx._layers.linear import LoRA as _LoRA
from mpmodules.nnx._layers.linear import LoRALinear as _LoRALinear
from mpmodules.nnx._training import ModelAndOptimizer as ModelAndOptimizer
from mpmodules.nnx._module import Module as Module
from mpmodules.nnx._layers.attention import MultiHeadAttention as _MultiHeadAttention
from mpmodules.nnx._layers.recurrent import OptimizedLSTMCell as _OptimizedLSTMCell
from mpmodules.nnx._training import Optimizer as Optimizer
from mpmodules.nnx._layers.elementwise import PReLU as _PReLU
from mpmodules.nnx._quantized import QuantizedParam as QuantizedParam
from mpmodules.nnx._layers.normalization import RMSNorm as _RMSNorm
from mpmodules.nnx._layers.recurrent import RNN as _RNN
from mpmodules.nnx._layers.recurrent import RNNCellBase as RNNCellBase
from mpmodules.nnx._layers.newer_flax import RoPE as _RoPE
from mpmodules.nnx._layers.elementwise import Sequential as _Sequential
from mpmodules.nnx._layers.recurrent import SimpleCell as _SimpleCell
from mpmodules.nnx._layers.normalization import SpectralNorm as _SpectralNorm
from mpmodules.nnx._layers.normalization import WeightNorm as _WeightNorm
from mpmodules.nnx._port import apply_policy as apply_policy
from mpmodules.functions.reductions import avg_pool as avg_pool
from mpmodules.nnx._layers.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from mpmodules.nnx._layers.newer_flax import (
    dot_product_attention_with_rope as dot_product_attention_with_rope,
)
from mpmodules.nnx._training import grad as grad
from mpmodules.functions.reductions import log_sigmoid as log_sigmoid
from mpmodules.functions.reductions import log_softmax as log_softmax
from mpmodules.functions.reductions import logsumexp as logsumexp
from mpmodules.functions.reductions import max_pool as max_pool
from mpmodules.functions.reductions import min_pool as min_pool
from mpmodules.functions.reductions import pool as pool
from mpmodules.functions.reductions import softmax as softmax
from mpmodules.functions.reductions import softplus as softplus
from mpmodules.functions.reductions import standardize as standardize
from mpmodules.nnx._summary import tabulate as tabulate
from mpmodules.nnx._training import value_and_grad as value_and_grad
from mpmodules.nnx._module import ModuleMeta as _ModuleMeta

_T = _typing.TypeVar("_T")

class _LayerMeta(_ModuleMeta):
    def __call__(cls: type[_T], *args: _typing.Any, **kwargs: _typing.Any) -> _T: ...  # type: ignore[override]

class BatchNorm(_BatchNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: _types.Initializer = ...,
        scale_init: _types.Initializer = ...,
        axis_name: _typing.Optional[str] = None,
        axis_index_groups: _typing.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        scale_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Bidirectional(_Bidirectional, metaclass=_LayerMeta):
    def __init__(
        self,
        forward_rnn: _recurrent.RNNBase,
        backward_rnn: _recurrent.RNNBase,
        *,
        merge_fn: _abc.Callable[[_jax.Array, _jax.Array], _jax.Array] = ...,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: _nnx.Rngs | _nnx.RngStream | bool = True,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Conv(_Conv, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | _typing.Sequence[int],
        strides: _typing.Union[None, int, _typing.Sequence[int]] = 1,
        *,
        padding: _types.PaddingLike = "SAME",
        input_dilation: _typing.Union[None, int, _typing.Sequence[int]] = 1,
        kernel_dilation: _typing.Union[None, int, _typing.Sequence[int]] = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: _typing.Optional[_jax.Array] = None,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        precision: _types.PrecisionLike = None,
        kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        conv_general_dilated: _types.ConvGeneralDilatedT = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        preferred_element_type: _types.Dtype | None = None,
        rngs: _nnx.Rngs,
        kernel_metadata: _typing.Mapping[str, _typing.Any] = ...,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class ConvTranspose(_ConvTranspose, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | _typing.Sequence[int],
        strides: int | _typing.Sequence[int] | None = None,
        *,
        padding: _types.PaddingLike = "SAME",
        kernel_dilation: int | _typing.Sequence[int] | None = None,
        use_bias: bool = True,
        mask: _jax.Array | None = None,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        precision: _types.PrecisionLike | None = None,
        kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        transpose_kernel: bool = False,
        promote_dtype: _types.PromoteDtypeFn = ...,
        preferred_element_type: _types.Dtype | None = None,
        rngs: _nnx.Rngs,
        kernel_metadata: _typing.Mapping[str, _typing.Any] = ...,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Dropout(_Dropout, metaclass=_LayerMeta):
    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: _abc.Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: _nnx.Rngs | _nnx.RngStream | None = None,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Einsum(_Einsum, metaclass=_LayerMeta):
    def __init__(
        self,
        einsum_str: str,
        kernel_shape: _types.Shape,
        bias_shape: _typing.Optional[_types.Shape] = None,
        *,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        precision: _types.PrecisionLike = None,
        kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        einsum_op: _types.EinsumT = ...,
        preferred_element_type: _types.Dtype | None = None,
        rngs: _nnx.Rngs,
        kernel_metadata: _typing.Mapping[str, _typing.Any] = ...,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Embed(_Embed, metaclass=_LayerMeta):
    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        embedding_init: _types.Initializer = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        embedding_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class GRUCell(_GRUCell, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: _abc.Callable[..., _typing.Any] = ...,
        activation_fn: _abc.Callable[..., _typing.Any] = ...,
        kernel_init: _types.Initializer = ...,
        recurrent_kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        carry_init: _types.Initializer | None = None,
        promote_dtype: _types.PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        rngs: _nnx.Rngs,
        kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        recurrent_kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class GroupNorm(_GroupNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        num_features: int,
        num_groups: _typing.Optional[int] = 32,
        group_size: _typing.Optional[int] = None,
        *,
        epsilon: float = 1e-06,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: _types.Initializer = ...,
        scale_init: _types.Initializer = ...,
        reduction_axes: _typing.Optional[_types.Axes] = None,
        axis_name: _typing.Optional[str] = None,
        axis_index_groups: _typing.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        scale_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class InstanceNorm(_InstanceNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-06,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: _types.Initializer = ...,
        scale_init: _types.Initializer = ...,
        feature_axes: _types.Axes = -1,
        axis_name: _typing.Optional[str] = None,
        axis_index_groups: _typing.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        scale_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class LSTMCell(_LSTMCell, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: _abc.Callable[..., _typing.Any] = ...,
        activation_fn: _abc.Callable[..., _typing.Any] = ...,
        kernel_init: _types.Initializer = ...,
        recurrent_kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        carry_init: _types.Initializer | None = None,
        promote_dtype: _types.PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        rngs: _nnx.Rngs,
        kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        recurrent_kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class LayerNorm(_LayerNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-06,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: _types.Initializer = ...,
        scale_init: _types.Initializer = ...,
        reduction_axes: _types.Axes = -1,
        feature_axes: _types.Axes = -1,
        axis_name: _typing.Optional[str] = None,
        axis_index_groups: _typing.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        scale_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Linear(_Linear, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        precision: _types.PrecisionLike = None,
        kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        dot_general: _types.DotGeneralT = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        preferred_element_type: _types.Dtype | None = None,
        rngs: _nnx.Rngs,
        kernel_metadata: _typing.Mapping[str, _typing.Any] = ...,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class LinearGeneral(_LinearGeneral, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int | _typing.Sequence[int],
        out_features: int | _typing.Sequence[int],
        *,
        axis: int | _typing.Sequence[int] = -1,
        batch_axis: _typing.Mapping[int, int] = ...,
        use_bias: bool = True,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        precision: _types.PrecisionLike = None,
        promote_dtype: _types.PromoteDtypeFn = ...,
        dot_general: _types.DotGeneralT | None = None,
        dot_general_cls: _typing.Any = None,
        preferred_element_type: _types.Dtype | None = None,
        rngs: _nnx.Rngs,
        kernel_metadata: _typing.Mapping[str, _typing.Any] = ...,
        bias_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class LoRA(_LoRA, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: _typing.Optional[_nnx.Module] = None,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        a_initializer: _types.Initializer = ...,
        b_initializer: _types.Initializer = ...,
        lora_param_type: _typing.Type[_nnx.Variable] = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        a_metadata: _typing.Mapping[str, _typing.Any] = ...,
        b_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class LoRALinear(_LoRALinear, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: _typing.Optional[_types.Dtype] = None,
        lora_param_dtype: _types.Dtype = ...,
        a_initializer: _types.Initializer = ...,
        b_initializer: _types.Initializer = ...,
        lora_param_type: _typing.Type[_nnx.Variable] = ...,
        lora_promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        a_metadata: _typing.Mapping[str, _typing.Any] = ...,
        b_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
        **kwargs: _typing.Any,
    ) -> None: ...

class MultiHeadAttention(_MultiHeadAttention, metaclass=_LayerMeta):
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: _types.PrecisionLike = None,
        kernel_init: _types.Initializer = ...,
        out_kernel_init: _types.Initializer | None = None,
        bias_init: _types.Initializer = ...,
        out_bias_init: _types.Initializer | None = None,
        use_bias: bool = True,
        attention_fn: _abc.Callable[..., _jax.Array] = ...,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: _types.PromoteDtypeFn = ...,
        out_promote_dtype: _types.PromoteDtypeFn = ...,
        ln_promote_dtype: _types.PromoteDtypeFn = ...,
        qkv_dot_general: _types.DotGeneralT | None = None,
        out_dot_general: _types.DotGeneralT | None = None,
        qkv_dot_general_cls: _typing.Any = None,
        out_dot_general_cls: _typing.Any = None,
        rngs: _nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        out_kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        out_bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        query_ln_scale_metadata: _abc.Mapping[str, _typing.Any] = ...,
        key_ln_scale_metadata: _abc.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class OptimizedLSTMCell(_OptimizedLSTMCell, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: _abc.Callable[..., _typing.Any] = ...,
        activation_fn: _abc.Callable[..., _typing.Any] = ...,
        kernel_init: _types.Initializer = ...,
        recurrent_kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        carry_init: _types.Initializer | None = None,
        promote_dtype: _types.PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        rngs: _nnx.Rngs,
        kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        recurrent_kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class PReLU(_PReLU, metaclass=_LayerMeta):
    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: _types.Dtype | None = None,
        param_dtype: _types.Dtype = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        negative_slope_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class RMSNorm(_RMSNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-06,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        use_scale: bool = True,
        scale_init: _types.Initializer = ...,
        reduction_axes: _types.Axes = -1,
        feature_axes: _types.Axes = -1,
        axis_name: _typing.Optional[str] = None,
        axis_index_groups: _typing.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        scale_metadata: _typing.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class RNN(_RNN, metaclass=_LayerMeta):
    def __init__(
        self,
        cell: _nnx.RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: _abc.Mapping[str, int | type[_nnx.Carry] | None] | None = None,
        broadcast_rngs: _filterlib.Filter = None,
        rngs: _nnx.Rngs | _nnx.RngStream | bool = True,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class RoPE(_RoPE, metaclass=_LayerMeta):
    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
        *,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class Sequential(_Sequential, metaclass=_LayerMeta):
    def __init__(
        self,
        *fns: _typing.Callable[..., _typing.Any],
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class SimpleCell(_SimpleCell, metaclass=_LayerMeta):
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: _types.Dtype = ...,
        param_dtype: _types.Dtype = ...,
        carry_init: _types.Initializer | None = None,
        residual: bool = False,
        activation_fn: _abc.Callable[..., _typing.Any] = ...,
        kernel_init: _types.Initializer = ...,
        recurrent_kernel_init: _types.Initializer = ...,
        bias_init: _types.Initializer = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        rngs: _nnx.Rngs,
        kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        recurrent_kernel_metadata: _abc.Mapping[str, _typing.Any] = ...,
        bias_metadata: _abc.Mapping[str, _typing.Any] = ...,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class SpectralNorm(_SpectralNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        layer_instance: _nnx.Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: _nnx.Rngs,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...

class WeightNorm(_WeightNorm, metaclass=_LayerMeta):
    def __init__(
        self,
        layer_instance: _nnx.Module,
        *,
        feature_axes: _types.Axes | None = -1,
        use_scale: bool = True,
        scale_init: _types.Initializer = ...,
        epsilon: float = 1e-12,
        dtype: _typing.Optional[_types.Dtype] = None,
        param_dtype: _types.Dtype = ...,
        variable_filter: _filterlib.Filter = ...,
        promote_dtype: _types.PromoteDtypeFn = ...,
        rngs: _nnx.Rngs,
        dtype_policy: _Policy | str | None = None,
    ) -> None: ...
