"""The table of JAX's primitives: a row for each, with its category, its kind and its traits.

Nothing else in this library lists names of primitives: it takes the sets below. Dispatch is on
names, because the objects behind them move and split between JAX versions.

A primitive is added as one name, or one row, to the kind that it belongs to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Autocast's category -> kind -> rows, `name name: trait trait`. Rows without a colon have none;
# an indented line belongs to the row above. A trait is a set below, in small letters, whose
# docstring says which primitives have it; or the collective of XLA that a primitive becomes.
_TABLE: dict[str, dict[str, str]] = {
    # The operands are cast to compute_dtype: operations of matrix units.
    "compute": {
        "attention": "dot_product_attention_fwd dot_product_attention_fwd_wrapper",
        "conv": "conv_general_dilated",
        "matmul": "dot_general ragged_dot_general",
        "matmul-lowrank": "symmetric_product",
    },
    # Half operands are widened: sums, and functions whose error or range half precision can not
    # bear.
    "fp32": {
        "collective-reduce": """
            psum_done psum_invariant_start psum_start reduce_scatter_done reduce_scatter_start
            unreduced_psum unreduced_psum_start unreduced_reduce_scatter
            unreduced_reduce_scatter_start
            psum psum_invariant: of_moments saved all-reduce
            reduce_scatter: saved reduce-scatter""",
        "cumulative": """
            cumlogsumexp cumsum
            cumprod: steep_at_bounds""",
        "fft": "fft",
        "linalg": """
            cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg
            householder_product lu lu_pivots_to_permutation ormqr qr schur svd triangular_solve
            tridiagonal tridiagonal_solve""",
        "reduction": """
            reduce: combines
            reduce_prod: saved steep_at_bounds
            reduce_sum: of_moments saved""",
        "scatter-sum": "scatter-add scatter-mul scatter-sub: combines",
        "select-sum": "select_and_gather_add select_and_scatter_add",
        "sparse": """
            bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcoo_sum_duplicates
            bcsr_dot_general coo_matmat coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec
            csr_spmm csr_spmv spsolve""",
        "special": """
            bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma
            regularized_incomplete_beta zeta
            digamma lgamma: steep_at_bounds
            _copysign one_minus_square polynomial: gentle
            nextafter: reads_bits gentle""",
        "transcendental": """
            asinh cosh exp2 expm1 sinh tan
            acos asin atanh log1p: steep_at_bounds steep_at_one
            acosh log2: steep_at_bounds
            erf_inv: gentle steep_at_bounds steep_at_one
            exp: elementwise reads_logits
            integer_pow: elementwise powers gentle of_moments steep_at_bounds
            log: elementwise steep_at_bounds
            pow: elementwise steep_at_bounds
            reciprocal: elementwise gentle steep_at_bounds
            rsqrt: elementwise square_roots gentle steep_at_bounds
            square: elementwise powers gentle of_moments""",
        "trig": "cos sin",
        "window": """
            reduce_window_sum
            reduce_window: combines""",
    },
    # Operands that mix: the rules of `policy.autocasting.values.common_dtype`.
    "promote": {
        "addition": """
            add: elementwise injective rescales of_moments joins_roots
            add_any: elementwise
            sub: elementwise injective rescales of_moments joins_roots reads_logits""",
        "arith": """
            atan2
            rem: steep_at_bounds""",
        "compare": "eq ge gt le lt ne",
        "compare-total": "eq_to le_to lt_to",
        "complex": "complex",
        "minmax": """
            clamp: exact elementwise limits of_moments
            max: exact elementwise rescales passes_activations of_moments joins_roots
            min: exact elementwise limits passes_activations of_moments""",
        "product": """
            div: elementwise rescales passes_activations of_moments steep_at_bounds
            mul: elementwise rescales passes_activations of_moments""",
        "ref-write": "accum_grad_in_ref addupdate masked_swap store swap",
        "select": """
            select_n: picks free exact elementwise selects_literals places limits rescales
                passes_activations of_moments joins_roots""",
        "structural": """
            concatenate: free exact places of_moments joins_roots
            pad: free exact places
            scatter-max scatter-min select_and_scatter: combines
            stack: moves_data free exact of_moments joins_roots""",
        "update": """
            dynamic_update_slice: free exact places of_moments
            scatter: free exact combines""",
    },
    # Runs in the dtype that its operand has: moves numbers, compares them, or is bounded and
    # smooth.
    "passthrough": {
        "bounded-activation": """
            atan
            erf erfc: bounded
            logistic tanh: elementwise bounded""",
        "broadcast": """
            broadcast_in_dim: moves_data free exact forwards keeps_constants moves_cotangents
                rearranges selects_literals repeats
            broadcast_to: moves_data free exact forwards keeps_constants repeats""",
        "collective-move": """
            all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start
            all_to_all_done all_to_all_start ppermute_done ppermute_start precv psend
            ragged_all_to_all unreduced_pmax unreduced_pmin
            all_gather all_gather_invariant: moves_data exact saved all-gather
            all_to_all: moves_data exact saved all-to-all
            pmax pmin: exact saved all-reduce
            ppermute: moves_data exact saved collective-permute""",
        "complex-part": "conj imag real",
        "extreme": """
            argmax argmin: chooses
            reduce_max reduce_min: saved counts_ties""",
        "grad-barrier": """
            dce_sink remat_opt tie unpin
            custom_lin: combines
            as_stored materialize: moves_data free exact keeps_constants annotates
            name: moves_data free exact forwards
            optimization_barrier: moves_data free exact forwards keeps_constants
            pin: exact
            stage: moves_data
            stop_gradient: moves_data free exact forwards keeps_constants injective""",
        "inspect": "is_finite: exact",
        "layout": """
            bcoo_transpose
            copy: moves_data free exact forwards keeps_constants moves_cotangents rearranges
                injective
            dynamic_slice: picks moves_data free exact forwards keeps_constants moves_cotangents
            split: moves_data free exact forwards keeps_constants moves_cotangents
            gather: picks moves_data free exact forwards moves_cotangents repeats
            layout_cast: moves_data
            layout_constraint: exact forwards
            relayout roll: exact
            slice: picks moves_data free exact forwards keeps_constants moves_cotangents keeps_axes
            rev: moves_data free exact forwards keeps_constants moves_cotangents keeps_axes
            tile: moves_data free exact forwards keeps_constants repeats
            transpose: moves_data free exact forwards keeps_constants moves_cotangents rearranges
            unstack: moves_data free exact forwards keeps_constants""",
        "order": """
            mosaic_gpu_reduce_max mosaic_gpu_reduce_min
            approx_top_k: repeats chooses
            cummax cummin: exact
            reduce_window_max reduce_window_min: counts_ties
            sort: free exact combines repeats chooses
            top_k: exact repeats chooses""",
        "ref-read": "get load masked_load",
        "reshape": """
            reshape squeeze: moves_data free exact forwards keeps_constants moves_cotangents
                rearranges""",
        "root": """
            cbrt: steep_at_bounds
            sqrt: elementwise square_roots steep_at_bounds""",
        "round": """
            ceil floor round
            sign: exact""",
        "sharding": """
            global_array_to_host_local_array has_memory_space host_local_array_to_global_array
            inspect_sharding pbroadcast_done pbroadcast_dynamic pbroadcast_start preduced
            reduced_vary_cast_p remove_memory_space vary_unreduced_cast vary_unreduced_cast_p
            with_memory_space_constraint
            device_put: moves_data free exact
            pbroadcast: moves_data exact forwards
            pvary: moves_data free exact forwards annotates
            reduced_vary_cast: exact
            reshard: moves_data free exact forwards
            sharding_constraint: moves_data free exact forwards keeps_constants annotates""",
        "sign": """
            abs: exact elementwise rescales of_moments
            neg: exact elementwise injective passes_activations of_moments""",
        "sparse-layout": """
            bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_todense bcsr_extract
            bcsr_fromdense bcsr_todense coo_fromdense coo_todense csr_fromdense csr_todense
            todense""",
    },
    # The author chose the dtypes: they are respected.
    "explicit": {
        "bits": """
            bitcast: reads_bits
            bitcast_convert_type: free reads_bits""",
        "cast": """
            cast_like: forwards
            convert_element_type: forwards injective selects_literals rescales passes_activations
            reduce_precision: forwards
            stochastic_round: reads_bits""",
        "fp8": """
            dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
            dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper""",
        "matmul-scaled": "scaled_dot scaled_matmul scaled_matmul_wrapper",
    },
    # Holds programs, which are rewritten too.
    "control": {
        "branch": "cond",
        "call": "call closed_call core_call eval_jaxpr jaxpr_call named_call xla_metadata_call",
        "derivative": """
            custom_jvp_call_jaxpr
            custom_jvp_call custom_vjp_call: inlined""",
        "devices": "shard_map",
        "jit": "jit: inlined",
        "loop": "scan while",
        "remat": "checkpoint remat2",
    },
    # Gets its operands in the dtypes that it was traced with.
    "opaque": {
        "attention-bwd": "dot_product_attention_bwd dot_product_attention_bwd_wrapper",
        "attention-kernel": "splash_attention",
        "host": "debug_callback debug_print io_callback pure_callback trace_value",
        "kernel": """
            call_exported cudnn_fusion custom_partitioning emit_pipeline ffi_call mosaic_gpu_p
            pallas_call pipeline_body run_scoped tpu_custom_call""",
        "opaque-call": """
            call_hi_primitive call_hi_primitive_linearized core_map custom_fusion linear_call
            mpmd_map run_state
            composite custom_vmap_call: inlined""",
    },
    # Integers, keys, tokens and effects: nothing to cast.
    "exempt": {
        "create": """
            after_all axis_index create_linear create_token dim_as_value dimension_size empty2
            zeros_like
            empty iota: free""",
        "edtype": "from_edtype to_edtype",
        "effects": """
            box_get box_set check empty_ref free_ref freeze get_barrier_semaphore get_global
            get_variable log_extend log_read new_box new_log new_ref new_variable set_variable
            shape_assertion unreachable xla_metadata_value""",
        "int/bool": """
            and clz mulhi not or population_count reduce_and reduce_or reduce_xor shift_left
            shift_right_arithmetic shift_right_logical xor""",
        "layout-hint": "max_contiguous multiple_of",
        "platform": "platform_index",
        "rng": """
            iota_2x32_shape philox2x32 philox4x32 prng_join prng_random_bits prng_seed prng_split
            random_bits random_clone random_fold_in random_seed random_split random_unwrap
            random_wrap rng_bit_generator threefry2x32 threefry4x32
            random_gamma rng_uniform: reads_bits""",
    },
}


class Primitive(NamedTuple):
    """A row of the table.

    Attributes:
      name: the primitive's, as equations have it.
      category: the way that autocast treats it.
      kind: the group that it stands in; no two categories have kinds of one name.
      traits: the names of the sets below that it belongs to, in small letters.
    """

    name: str
    category: str
    kind: str
    traits: tuple[str, ...] = ()


def _rows(category: str, kind: str) -> Iterator[Primitive]:
    text = _TABLE[category][kind].replace("\n" + " " * 16, " ")  # rows go on in indented lines
    for line in text.splitlines():
        names, _, traits = line.partition(":")
        for name in names.split():
            yield Primitive(name, category, kind, tuple(traits.split()))


PRIMITIVES: tuple[Primitive, ...] = tuple(
    row for category, kinds in _TABLE.items() for kind in kinds for row in _rows(category, kind)
)
"""All rows of the table."""

CATEGORY_OF: dict[str, str] = {row.name: row.category for row in PRIMITIVES}
"""The category of each primitive. Other libraries have primitives without one."""


def of_kinds(*kinds: str) -> frozenset[str]:
    """Returns the primitives that stand in some kinds of the table."""
    return frozenset(row.name for row in PRIMITIVES if row.kind in kinds)


def _with(trait: str) -> frozenset[str]:
    return frozenset(row.name for row in PRIMITIVES if trait in row.traits)


# -------------------------------------------------------------------------------------------------
# Kinds
# -------------------------------------------------------------------------------------------------

MATMULS = of_kinds("matmul", "conv")
"""Matmuls and convolutions, which compute_dtype is for: reported where they stay in float32."""

SCALED_DOTS = of_kinds("matmul-scaled")
"""Matmuls of two operands with scales; the scales follow as operands."""

DOTS = of_kinds("matmul", "attention", "fp8") | SCALED_DOTS
"""Matmuls, and fused ones, such as attention by one call of a library."""

ATTENTIONS = of_kinds("attention", "attention-bwd", "attention-kernel")
"""Attention in one kernel, forward and backward; the operands are queries, keys and values, and
more."""

CONVOLUTIONS = of_kinds("conv")
"""Convolutions."""

CASTS = of_kinds("cast")
"""Change the dtype of numbers, or round them as if they did."""

TRANSCENDENTALS = of_kinds("transcendental", "special") | {"logistic", "tanh"}
"""Functions of one number or two that hardware approximates."""

PERIODIC = of_kinds("trig")
"""Sine and cosine."""

ADDITIONS = of_kinds("addition")
"""Sum or difference of two arrays; `add_any` sums cotangents."""

FORWARD_ADDITIONS = ADDITIONS - {"add_any"}
"""Sum or difference of two arrays, as a program writes it."""

PRODUCTS = of_kinds("product")
"""Product or quotient of two arrays. Its derivative reads the other operand."""

SCALINGS = PRODUCTS | {"neg"}
"""Products and changes of sign: linear in one operand."""

ROUNDINGS = of_kinds("round") - {"sign"}
"""Round to whole numbers."""

COMPARISONS = of_kinds("compare")
"""Comparisons of two arrays by the order of numbers, in which no NaN takes part."""

MINMAX = of_kinds("minmax")
"""Limit numbers by others."""

SIGN_CHANGES = of_kinds("sign")
"""Change the sign of numbers at most."""

_OTHER_NARY = of_kinds("arith", "compare-total", "complex") | {"pow"}
NARY = ADDITIONS | PRODUCTS | COMPARISONS | MINMAX | _OTHER_NARY
"""Elementwise functions of several operands, each of which may be broadcast from size 1."""

ROOTS = of_kinds("root") | {"pow"}
"""Roots that are not inverse, and powers, which may be roots."""

REDUCTIONS = of_kinds("reduction")
"""Sums and products over axes, and reductions by a function of two numbers."""

CUMULATIVE = of_kinds("cumulative")
"""Running totals along an axis."""

WINDOWED = of_kinds("window")
"""Sums over windows, and reductions of windows by a function of two numbers."""

EXTREMES = of_kinds("extreme")
"""Largest and smallest numbers along axes, and their places."""

ORDERS = of_kinds("order")
"""Return numbers of an array by their order: extremes of windows, sorted and largest ones."""

SUMMING_COLLECTIVES = of_kinds("collective-reduce")
"""Collectives that sum over devices."""

UPDATES = of_kinds("update")
"""Write one operand into a part of the first."""

BROADCASTS = of_kinds("broadcast")
"""Repeat numbers along axes."""

RESHAPES = of_kinds("reshape")
"""Give the numbers, in their order, another shape."""

CALLS = of_kinds("call")
"""Run the one program that they hold, and say nothing about it."""

REMATS = of_kinds("remat")
"""Checkpoints: run their program, and again in the backward pass."""

RUNS_PROGRAMS = CALLS | REMATS | of_kinds("branch", "devices", "jit", "loop")
"""Run programs in order, without a rule of their own for derivatives."""

WIDENABLE_SUMS = frozenset(("reduce_sum", "cumsum", "scatter-add", "select_and_scatter_add"))
"""Sums in the dtype of their operands: in float32 where these are widened."""

LINEAR_IN_ALL = ADDITIONS | UPDATES | frozenset(("neg", "select_n", "concatenate", "pad"))
"""Linear in all floating operands, which have the dtype of the result."""

ONE_FOR_EACH = SUMMING_COLLECTIVES | frozenset(("optimization_barrier",))
"""Return one result for each operand."""

REBUILT = frozenset(("jit", "while"))
"""Return the dtypes that they were traced with, where autocast rebuilds them."""

HOST = of_kinds("host")
"""Callbacks: run on the host, where a call may be seen, or change something."""

KERNELS = of_kinds("kernel")
"""Kernels: their programs are of another machine's language."""


# -------------------------------------------------------------------------------------------------
# Traits: data movement, from the widest set to the narrowest
# -------------------------------------------------------------------------------------------------

EXACT = _with("exact") | of_kinds("compare", "compare-total", "complex-part", "extreme")
"""Return numbers that were given to them, or the sign of one: exact in any dtype."""

FREE = _with("free")
"""No floating-point operation: move numbers, choose between them, or say something about them."""

MOVES_DATA = _with("moves_data")
"""Hand on the numbers of an operand in its dtype, some of them, in any shape, on any device."""

FORWARDS = _with("forwards")
"""Hand on the numbers of an operand on one device, some of them or several times, cast or not."""

REPEATS = _with("repeats")
"""May return a number several times, or differentiate as a lookup: cotangents are sums."""

COUNTS_TIES = _with("counts_ties")
"""Extremes whose derivatives are sums, over windows or over equal numbers."""

KEEPS_CONSTANTS = _with("keeps_constants")
"""Of an array that holds one number throughout, return another that does."""

MOVES_COTANGENTS = _with("moves_cotangents")
"""Move the first operand only, by JAX's public functions: run on its float32 value as they are."""

PICKS = _with("picks") | MATMULS | ORDERS
"""Read some numbers of an operand, or all, as they were rounded."""

REARRANGES = _with("rearranges")
"""Return the same numbers in another shape or order."""

ANNOTATES = _with("annotates")
"""Return their operand, for the compiler or the sharding."""

KEEPS_AXES = _with("keeps_axes")
"""Leave every number on the axes that it stood along: leave some out, or reverse them."""

INJECTIVE = _with("injective")
"""Keep different integers different, if all are added to or subtracted from one number."""

SELECTS_LITERALS = _with("selects_literals")
"""Return numbers of their operands, which may be literals, cast or repeated."""

PLACES = _with("places")
"""Put the numbers of several operands beside each other."""


# -------------------------------------------------------------------------------------------------
# Traits: arithmetic
# -------------------------------------------------------------------------------------------------

ACCUMULATES = of_kinds("reduction", "cumulative", "window", "select-sum", "scatter-sum")
"""Sum or multiply up many numbers in the dtype that they have."""

COMBINES = _with("combines")
"""Hold a small program of two numbers: no part of the program that runs in order."""

ELEMENTWISE = _with("elementwise")
"""One number of each operand makes one of the result: of these, normalizations are made."""

READS_BITS = _with("reads_bits")
"""Read or cut off bits: their result depends on how many there are."""

BITWISE = frozenset(("and", "or", "xor", "shift_left", "shift_right_logical"))
"""Join and split the bits of integers."""

REASSEMBLES = (MOVES_DATA | EXACT | BITWISE | CASTS | {"bitcast_convert_type"}) - MINMAX
"""Widen, split, join or move a stored number: it is the same number still, or half of its bits."""

SQUARE_ROOTS = _with("square_roots")
"""Square roots, inverse or not."""

POWERS = _with("powers")
"""Integer powers: float16 has no range for them."""

DIVIDES = frozenset(("div", "integer_pow", "log", "log1p", "pow", "rem", "rsqrt"))
"""Not finite at zero, or at minus one: quotients, logarithms and powers."""

MAKES_NONFINITE = DIVIDES | ROOTS | of_kinds("transcendental", "special")
"""Make infinities or NaN of finite numbers that are far from the end of their range."""

GENTLE = _with("gentle")
"""Powers, parts of derivatives of bounded functions, and the function that draws normal numbers."""

STEEP = of_kinds("transcendental", "special") - GENTLE
"""Exponentials, logarithms, powers, and functions as sensitive as these: no activations."""

BOUNDED = _with("bounded")
"""Activations whose result is bounded, and those that add up to one of them with a number."""

STEEP_AT_BOUNDS = _with("steep_at_bounds")
"""Infinite, or of infinite slope, at a bound of their operand or divisor: logarithms, roots, ..."""

STEEP_AT_ONE = _with("steep_at_one")
"""Of these, those whose bound is 1, or minus one."""

LIMITS = _with("limits")
"""Keep a value from being large, if so written: `where`, `minimum`, `clip`."""

RESCALES = _with("rescales")
"""Cast, shift, scale, select or limit a statistic: its result is one still."""

PASSES_ACTIVATIONS = _with("passes_activations")
"""Cast, scale, select or limit a function's result: its result is that value still."""

OF_MOMENTS = _with("of_moments")
"""Stand between the sum of a second moment and its root, beside those that forward numbers."""

JOINS_ROOTS = _with("joins_roots")
"""Shift, limit or join a statistic's root by stored values."""

READS_LOGITS = _with("reads_logits")
"""Read the shifted logits of a log_softmax: nothing else does."""

CHOOSES = _with("chooses")
"""Give the places of the largest numbers."""

DRAWS = of_kinds("rng")
"""Make random bits, or keys."""


# -------------------------------------------------------------------------------------------------
# Traits: programs and devices
# -------------------------------------------------------------------------------------------------

INLINED = _with("inlined") | of_kinds("call")
"""Call their one program once: derivative rules aside, it may stand in their place."""

REWRITTEN_INSIDE = frozenset(row.name for row in PRIMITIVES if row.category == "control")
"""Hold programs that autocast rewrites."""

SAVED = _with("saved")
"""Reductions and collectives: smaller than their operand, or an exchange to have again."""

HLO_COLLECTIVES: dict[str, str] = {
    row.name: trait for row in PRIMITIVES for trait in row.traits if "-" in trait
}
"""The collective of XLA's that a primitive becomes, by the primitive's name."""


def known_primitives(names: Iterable[str], what: str) -> frozenset[str]:
    """Returns the names themselves, each checked to be a primitive of the table.

    Raises:
      TypeError: `names` is a string.
      ValueError: a name that is no primitive's, with the nearest that are.
    """
    if isinstance(names, str):
        way_out = f"a collection of primitive names, such as ({names!r},)"
        raise TypeError(f"{what} should be {way_out}, but got the string itself.")
    checked = frozenset(names)
    for name in checked:
        if name not in CATEGORY_OF:
            near = difflib.get_close_matches(str(name), CATEGORY_OF, n=3)
            raise ValueError(
                f"{what} names {name!r}, which is not a known JAX primitive. "
                f"Nearest: {', '.join(near) if near else 'none'}."
            )
    return checked


# The kinds of operations, as reports name them.
_KINDS = {
    "dot": DOTS,
    "convolution": CONVOLUTIONS,
    "reduction": of_kinds("reduction", "cumulative", "window", "select-sum"),
    "scatter-add": of_kinds("scatter-sum"),
    "transcendental": TRANSCENDENTALS,
    "collective": of_kinds("collective-reduce", "collective-move"),
    "cast": CASTS,
    "opaque": of_kinds("kernel", "attention-bwd", "linalg", "fft"),
}
OPERATION_KINDS = (*_KINDS, "other")
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def kind_of(name: str) -> str:
    """Returns the kind of a primitive by its name: one of `OPERATION_KINDS`."""
    return _KIND_OF.get(name, "other")
